"""Finds algorithms: every module of this package that defines a subclass of `Algorithm` offers it by its name.

Packages named in the environment variable `SPECDEC_ALGORITHMS` (separated by commas) are searched as well.

Nothing here imports torch, and algorithm files import it only inside methods: the command line reads all configurations
before it knows whether anything will run.
"""

from __future__ import annotations

import importlib
import os
import pkgutil

import algorithms
from algorithms.runtime.algorithm import Algorithm

PACKAGES_VARIABLE = "SPECDEC_ALGORITHMS"


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
    """Every algorithm by name: the shipped ones, and those of the packages in `SPECDEC_ALGORITHMS`."""
    packages = [name.strip() for name in os.environ.get(PACKAGES_VARIABLE, "").split(",") if name.strip()]
    found: dict[str, type[Algorithm]] = {}
    for package in (algorithms.__name__, *packages):
        found |= algorithms_in(package)
    return found
