"""Plain values, as YAML and JSON give them, into a section's dataclass: names and types are checked here."""

import difflib
import types
import typing
from collections.abc import Iterable
from typing import Any, TypeVar, Union

Section = TypeVar("Section")


def section_from_dict(section: type[Section], values: dict[str, Any]) -> Section:
    """Build one section's dataclass from plain values, checking names and types.

    Raises:
        ValueError: an unknown key (with the nearest known name), or a value of the wrong type.
    """
    hints = typing.get_type_hints(section)
    for key in values:
        require_known(key, hints, f"key in {section.__name__}")
    return section(
        **{key: _coerce(f"{section.__name__}.{key}", v, hints[key]) for key, v in values.items()}
    )


def require_sections(sections: Any, where: str = "") -> None:
    """Refuse what is not a mapping of section names to mappings (or to nothing) with a ValueError."""
    if not isinstance(sections, dict) or not all(
        section is None or isinstance(section, dict) for section in sections.values()
    ):
        raise ValueError(f"{where}expected sections model:, training: and data:, each with keys")


def require_known(name: Any, known: Iterable[str], what: str) -> None:
    """Refuse a name that is not known with a ValueError that suggests the nearest one."""
    known = list(known)
    if not isinstance(name, str):
        raise ValueError(f"unknown {what}: {name!r}; known: {', '.join(known)}")
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise ValueError(f"unknown {what}: {name!r}; {hint}")


def _coerce(name: str, value: Any, wanted: Any) -> Any:
    """Read a YAML value as the field's type; YAML 1.1 reads 1e-3 as text, so numbers are parsed here."""
    options = (
        typing.get_args(wanted)
        if typing.get_origin(wanted) in (Union, types.UnionType)
        else (wanted,)
    )
    if value is None and type(None) in options:
        return None
    if isinstance(value, bool):
        if bool in options:
            return value
    elif int in options and isinstance(value, int | float) and value % 1 == 0:
        return int(value)  # neither infinity nor NaN has a remainder of 0
    elif float in options and isinstance(value, int | float | str):
        try:
            return float(value) if isinstance(value, str) else value
        except ValueError:
            pass
    if str in options and isinstance(value, str):
        return value
    names = " or ".join("nothing" if o is type(None) else o.__name__ for o in options)
    raise ValueError(f"{name} = {value!r}: expected {names}")
