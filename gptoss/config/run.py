"""One run: its three sections, read from a packaged name or a YAML file, with overrides."""

import dataclasses
import json
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from .data import DataConfig
from .model import ModelConfig
from .sections import require_known, require_sections, section_from_dict
from .training import TrainingConfig


@dataclass
class RunConfig:
    """One run: the three sections of a YAML file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    data: DataConfig = field(default_factory=DataConfig)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The run as plain values, ready for YAML or JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, sections: dict[str, Any]) -> "RunConfig":
        """Build a run from plain sections.

        Raises:
            ValueError: an unknown section or key (with the nearest known name), a value of the wrong type, or a rule
                of the section that does not hold.
        """
        known = {f.name: f.default_factory for f in dataclasses.fields(cls)}
        for name in sections:
            require_known(name, known, "section")
        return cls(
            **{
                name: section_from_dict(typing.cast(type, factory), sections.get(name) or {})
                for name, factory in known.items()
            }
        )

    @classmethod
    def from_saved(cls, sections: Any) -> "RunConfig":
        """Build a run from the config.json that it left beside its weights, also from before some fields existed.

        A field that came later takes its default, unless the model was trained as something else: YaRN once changed all
        layers and left pruned pairs at 1, so a model trained with YaRN keeps that.

        Raises:
            ValueError: as in `from_dict`, or another form.
        """
        require_sections(sections)
        model, training = sections.get("model") or {}, sections.get("training") or {}
        if training.get("rope") == "yarn":
            model = {"yarn_layers": "all", "yarn_mscale_pruned": False} | model
        return cls.from_dict(sections | {"model": model})


def list_configs() -> list[str]:
    """The names of the configurations that come with the package."""
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in resources.files("gptoss").joinpath("configs").iterdir()
        if entry.name.endswith(".yaml")
    )


def load_config(name_or_path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a run from a packaged name ("tiny") or a YAML file, then apply overrides.

    Args:
        name_or_path: one of `list_configs()`, or the path of a YAML file with `model:`, `training:` and `data:`.
        overrides: strings such as "training.lr=1e-3", read as YAML and applied in order.

    Raises:
        FileNotFoundError: neither a packaged name nor a file.
        ValueError: the file is not YAML of that form, or a key or value is wrong; the message says which.
    """
    name = str(name_or_path)
    path = Path(name)
    if name in list_configs():
        text = (
            resources.files("gptoss")
            .joinpath("configs", f"{name}.yaml")
            .read_text(encoding="utf-8")
        )
    elif path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{name}: not UTF-8 text: {error}; give a YAML file") from error
    else:
        raise FileNotFoundError(
            f"no configuration {name!r}: give a YAML file or one of {', '.join(list_configs())}"
        )
    sections = _read_yaml(text, name)
    if sections is None:  # an empty file
        sections = {}
    require_sections(sections, f"{name}: ")
    for override in overrides:
        _apply_override(sections, override)
    return RunConfig.from_dict(sections)


def read_run_config(path: Path) -> RunConfig:
    """The configuration that a run left as config.json, as `RunConfig.from_saved` understands it.

    Raises:
        ValueError: the file is not one.
    """
    try:
        return RunConfig.from_saved(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path}: not a run's configuration: {error}") from error


def _apply_override(sections: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    section, dot, key = path.strip().partition(".")
    if not (equals and dot and section and key):
        raise ValueError(
            f"override {override!r}: expected section.key=value, as in training.lr=1e-3"
        )
    if sections.get(section) is None:
        sections[section] = {}
    sections[section][key] = _read_yaml(text, f"override {override!r}")


class _EachKeyOnce(yaml.SafeLoader):
    """YAML as plain values; a key that stands twice is an error, where PyYAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key!r} stands there twice", problem_mark=node.start_mark
                )
        return super().construct_mapping(node, deep)


def _read_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_EachKeyOnce)
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from error
