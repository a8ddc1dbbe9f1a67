"""Finds algorithms: subclasses of `Algorithm`, each known by its `name`.

The shipped ones are the modules of this package, and the modules `drafting` of its folders. An installed package
offers its own by an entry point in the group `specdec.algorithms`, `NAME = "module:Class"`. The environment variable
`SPECDEC_ALGORITHMS` names importable modules, separated by commas. No torch is imported here, because the command
line reads all configurations first.
"""

import importlib.util
import os
import pkgutil
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any

from algorithms.algorithm import Algorithm

_HOME = __name__.rpartition(".")[0]
GROUP = "specdec.algorithms"
PACKAGES_VARIABLE = "SPECDEC_ALGORITHMS"


def algorithms_in(package: str) -> dict[str, type[Algorithm]]:
    """Algorithms with a name that `package`, a module in it, or the module `drafting` of a folder in it defines."""
    home = importlib.import_module(package)
    inside = [
        f"{package}.{info.name}.drafting" if info.ispkg else f"{package}.{info.name}"
        for info in pkgutil.iter_modules(getattr(home, "__path__", ()))
    ]
    modules = [home, *(importlib.import_module(name) for name in inside if importlib.util.find_spec(name))]
    values = [(module, value) for module in modules for value in vars(module).values()]
    return {
        value.name: value
        for module, value in values
        if isinstance(value, type)
        and issubclass(value, Algorithm)
        and hasattr(value, "name")
        and value.__module__ == module.__name__
    }


def available() -> dict[str, type[Algorithm]]:
    """Every algorithm by name; ValueError names the plugin that does not fit, and says why."""
    found = algorithms_in(_HOME)
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


def configured(kinds: Mapping[str, Any], what: str, name: Any, settings: Mapping[str, Any]) -> Any:
    """The configuration of one of `kinds`: `name` itself if it is one, with `settings` changed. Raises ValueError."""
    if not isinstance(name, str):
        return replace(name, **settings)
    if name not in kinds:
        close = get_close_matches(name, kinds, 1)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"{what}: expected one of {', '.join(sorted(kinds))}, got {name!r}{meant}")
    known = [field.name for field in fields(kinds[name].Config) if field.name != "name"]
    if unknown := [key for key in settings if key not in known]:
        raise ValueError(f"{what} {name}: {unknown[0]!r} is no setting; expected one of {', '.join(known) or 'none'}")
    return kinds[name].Config(**settings)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, (ImportError, AttributeError)) else f"{type(error).__name__}: {error}"


def _add(found: dict[str, type[Algorithm]], kind: Any, name: str, origin: str) -> None:
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        raise ValueError(f"{origin}: expected a subclass of algorithms.algorithm.Algorithm, got {kind!r}")
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
