"""What a wrapped attention package is asked, and what it answers. This module imports no torch."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Unsupported(ValueError):
    """A package that is not there, or a call that it cannot serve; the message is the reason."""


@dataclass(frozen=True)
class Needs:
    """What is known of a call before its tensors exist; `window` in positions, `kv_dtype` None for that of q."""

    mode: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    device: torch.device
    kv_dtype: torch.dtype | None = None
    window: int | None = None


@dataclass(frozen=True)
class AttentionCall:
    """One step's attention: the arguments that `specdec_kernels.paged_attention` documents, and its shapes.

    q comes as [B, num_queries, num_heads, head_dim], kv as [2, pages, page_size, num_kv_heads, head_dim].
    """

    page_table: torch.Tensor
    lengths: torch.Tensor
    mode: str
    num_queries: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_length: int
    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None
    mask: torch.Tensor | None = None
    q_lens: torch.Tensor | None = None
    tree_width: int | None = None
    window: int | None = None
    depths: torch.Tensor | None = None
    row_depths: torch.Tensor | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    scale: float | None = None

    @property
    def needs(self) -> Needs:
        return Needs(
            mode=self.mode,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            dtype=self.dtype,
            device=self.lengths.device,
            kv_dtype=self.kv_dtype,
            window=self.window,
        )

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def used_rows(self) -> torch.Tensor:
        """[B] int32 query rows in use."""
        import torch

        if self.q_lens is None:
            return torch.full_like(self.lengths, self.num_queries, dtype=torch.int32)
        return self.q_lens.clamp(0, self.num_queries)

    def drafted(self) -> torch.Tensor:
        """[B] int32 draft slots behind the prefix; none for a request without rows."""
        used = self.used_rows()
        return used if self.tree_width is None else (used > 0).to(used.dtype) * self.tree_width


class AttentionWrapper(Protocol):
    """The contract. An instance serves one stream of calls: a later `plan` may take the place of an earlier one."""

    name: str

    @staticmethod
    def available() -> str | None:
        """Why the package cannot be used on this machine, or None."""
        ...

    def refusal(self, needs: Needs) -> str | None:
        """Why calls of this kind cannot be served, or None."""
        ...

    def plan(self, call: AttentionCall) -> Any:
        """Prepare what all layers share. Raises `Unsupported` with the reason of `refusal`."""
        ...

    def run(self, planned: Any, q: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer: out [B, N, H, D] in q's dtype and lse [B, N, H] float32, natural logarithm, sinks included.
        Rows past `q_lens` are zeros with lse -inf."""
        ...


def missing(module: str, package: str) -> str | None:
    """Why `module` cannot be imported, naming the `package` that brings it, or None."""
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        return f"the package {package} is not installed"
    try:
        importlib.import_module(module)
    except Exception as failure:  # an optional package may fail to load in any way; the reason is its own words
        return f"{package} does not import: {type(failure).__name__}: {str(failure).splitlines()[:1]}"
    return None


def version(package: str) -> str:
    """Installed version of `package`, or `unknown` where it was not installed by a package manager."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA device, None for any other."""
    import torch

    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def no_device() -> str | None:
    """Why no NVIDIA GPU can be used, or None."""
    import torch

    if torch.version.hip:
        return "it needs an NVIDIA GPU, this is a ROCm build of torch"
    return None if torch.cuda.is_available() else "it needs an NVIDIA GPU, torch sees none"


def half_precision_only(needs: Needs) -> str | None:
    """The refusal of kernels that take float16 and bfloat16 throughout."""
    import torch

    if needs.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, the queries are {needs.dtype}"
    if needs.kv_dtype not in (None, needs.dtype):
        return f"the cache must have the dtype of the queries, {needs.dtype}, it has {needs.kv_dtype}"
    return None
