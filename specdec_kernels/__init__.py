"""Kernels for speculative decoding: tensors in, tensors out, no knowledge of models or of a configuration system.

A family folder holds the public functions, their definition in plain torch (`reference`), the Triton kernels
(`kernel`) and named inputs (`cases`); the names of its `__all__` can be imported from here. Names load at their
first use, and Triton only when a kernel is launched.

`impl` of a function is `auto`, `triton` or `reference`. Functions raise ValueError for a wrong shape, dtype, stride,
device or size, and RuntimeError for `impl="triton"` where no kernel can run.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

_ROOT = Path(__file__).parent

FAMILIES = tuple(
    sorted(".".join(path.relative_to(_ROOT).parts[:-1]) for path in _ROOT.glob("**/cases.py") if path.parent != _ROOT)
)
"""Names of all families below this package, such as `tree` or `compat.sglang`."""

if TYPE_CHECKING:
    # One line per family, for type checkers and editors. `compat` repeats foreign signatures and keeps its own names.
    from specdec_kernels.activation import *
    from specdec_kernels.all_reduce import *
    from specdec_kernels.attention import *
    from specdec_kernels.commit import *
    from specdec_kernels.experts import *
    from specdec_kernels.history import *
    from specdec_kernels.kv_index import *
    from specdec_kernels.kv_write import *
    from specdec_kernels.lattice import *
    from specdec_kernels.linear_attention import *
    from specdec_kernels.mla import *
    from specdec_kernels.norm import *
    from specdec_kernels.projection import *
    from specdec_kernels.sampling import *
    from specdec_kernels.tree import *
    from specdec_kernels.verify import *
else:

    def _names_of(family: str) -> list[str]:
        return import_module(f"{__name__}.{family}").__all__

    def __getattr__(name: str) -> Any:
        families = [family for family in FAMILIES if not family.startswith("compat.")]
        value: Any = None
        if name == "__all__":
            value = sorted({"FAMILIES", *(public for family in families for public in _names_of(family))})
        elif name in families:
            return import_module(f"{__name__}.{name}")
        elif not name.startswith("_"):
            family = next((family for family in families if name in _names_of(family)), None)
            value = family and getattr(import_module(f"{__name__}.{family}"), name)
        if value is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value  # the next use finds it without a search
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
