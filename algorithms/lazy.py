"""torch, imported at its first use: for modules that the command line reads before it needs torch."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Lazy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            value = getattr(import_module(self.__name__), name)
            setattr(self, name, value)  # the next use finds it at once
            return value

    torch = _Lazy("torch")
