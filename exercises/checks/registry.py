"""Finds every exercise: the names `check_…` of every module chNN.py in this folder."""

import importlib
import pkgutil
from types import ModuleType

from .exercise import Exercise


def chapters() -> dict[str, ModuleType]:
    """The chapter modules by name, "ch01" to "ch17". Each says in `NOTEBOOK` which notebook it belongs to."""
    package = importlib.import_module(__package__ or "checks")
    names = sorted(
        m.name for m in pkgutil.iter_modules(package.__path__) if m.name.startswith("ch")
    )
    names = [name for name in names if name[2:].isdigit()]
    return {name: importlib.import_module(f"{package.__name__}.{name}") for name in names}


def exercises(module: ModuleType) -> dict[str, Exercise]:
    """The exercises of one chapter by the name of their check, in the order of the file."""
    return {name: value for name, value in vars(module).items() if isinstance(value, Exercise)}
