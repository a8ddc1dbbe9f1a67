"""Finds algorithms. Each is a subclass of `Algorithm`, known by its `name`.

The shipped ones are the modules of this package. An installed package offers its own by an entry point in the group
`specdec.algorithms`, `NAME = "module:Class"`. A module or package that is not installed, but can be imported, is named
in the environment variable `SPECDEC_ALGORITHMS` (several are separated by commas).

Nothing here imports torch, and algorithm files import it only inside methods: the command line reads all configurations
before it knows whether anything will run.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from dataclasses import fields, is_dataclass
from importlib.metadata import entry_points
from typing import Any

import algorithms
from algorithms.runtime.algorithm import Algorithm

GROUP = "specdec.algorithms"
PACKAGES_VARIABLE = "SPECDEC_ALGORITHMS"


def algorithms_in(package: str) -> dict[str, type[Algorithm]]:
    """Algorithms that `package` itself, or a module directly in it, defines; by name."""
    home = importlib.import_module(package)
    inside = [info.name for info in pkgutil.iter_modules(getattr(home, "__path__", ())) if not info.ispkg]
    modules = [home, *(importlib.import_module(f"{package}.{name}") for name in inside)]
    values = [(module, value) for module in modules for value in vars(module).values()]
    return {
        value.name: value
        for module, value in values
        if isinstance(value, type) and issubclass(value, Algorithm) and value.__module__ == module.__name__
    }


def available() -> dict[str, type[Algorithm]]:
    """Every algorithm by name. Raises ValueError that names the plugin which does not fit, and says why."""
    found = algorithms_in(algorithms.__name__)
    for entry in entry_points(group=GROUP):
        origin = f"entry point {entry.name} = {entry.value} in the group {GROUP}"
        try:
            kind = entry.load()
        except Exception as error:  # a package of somebody else may raise anything
            raise ValueError(f"{origin}: cannot be loaded: {_reason(error)}") from error
        _add(found, kind, entry.name, origin)
    for package in filter(None, map(str.strip, os.environ.get(PACKAGES_VARIABLE, "").split(","))):
        origin = f"{PACKAGES_VARIABLE}={package}"
        try:
            offered = algorithms_in(package)
        except Exception as error:
            raise ValueError(f"{origin}: cannot be imported: {_reason(error)}") from error
        if not offered:
            raise ValueError(f"{origin}: expected a subclass of Algorithm in it, found none")
        for name, kind in offered.items():
            _add(found, kind, name, origin)
    return found


def _reason(error: Exception) -> str:
    """What `error` says; with its kind, unless something was not found."""
    return str(error) if isinstance(error, (ImportError, AttributeError)) else f"{type(error).__name__}: {error}"


def _add(found: dict[str, type[Algorithm]], kind: Any, name: str, origin: str) -> None:
    """Add the algorithm of a plugin, after checking what the command line relies on."""
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        raise ValueError(f"{origin}: expected a subclass of algorithms.runtime.algorithm.Algorithm, got {kind!r}")
    if getattr(kind, "name", None) != name:
        raise ValueError(f"{origin}: expected {kind.__name__}.name = {name!r}, got {getattr(kind, 'name', None)!r}")
    config = getattr(kind, "Config", None)
    defaults = {item.name: item.default for item in fields(config)} if is_dataclass(config) else {}
    if defaults.get("name") != name:
        got = f"{getattr(config, '__qualname__', repr(config))} with name = {defaults.get('name')!r}"
        expected = f"{kind.__name__}.Config to be a dataclass with the field name: str = {name!r}"
        raise ValueError(f"{origin}: expected {expected}, got {got}")
    if found.setdefault(name, kind) is not kind:
        raise ValueError(f"{origin}: {found[name].__module__} has an algorithm of the name {name!r} already")
