"""Finds algorithms: every module of this package that defines a subclass of `Algorithm` offers it by its name.

Nothing here imports torch, and algorithm files import it only inside methods: the command line reads all configurations
before it knows whether anything will run.
"""

from __future__ import annotations

import importlib
import pkgutil

import algorithms
from algorithms.runtime.algorithm import Algorithm


def algorithms_in(package: str) -> dict[str, type[Algorithm]]:
    """Algorithms defined in the modules of `package`, by name."""
    home = importlib.import_module(package)
    found: dict[str, type[Algorithm]] = {}
    for info in pkgutil.iter_modules(home.__path__):
        if info.ispkg:
            continue
        module = importlib.import_module(f"{package}.{info.name}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Algorithm) and value.__module__ == module.__name__:
                found[value.name] = value
    return found


def available() -> dict[str, type[Algorithm]]:
    """Every shipped algorithm by name."""
    return algorithms_in(algorithms.__name__)
