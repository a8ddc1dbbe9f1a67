"""The options of `drafter` and their schemas: what the modules of this package name in `SCHEMAS`."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

_MODULES = [import_module(f"{__name__}.{info.name}") for info in iter_modules(__path__)]
SCHEMAS: dict[str, Any] = dict(sorted(item for module in _MODULES for item in getattr(module, "SCHEMAS", {}).items()))

__all__ = ["SCHEMAS"]
