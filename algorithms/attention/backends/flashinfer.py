"""`backend=flashinfer`: FlashInfer's paged kernels for prompts, decode, chain, block and tree calls.

    chain, block   causal or not over N rows and L + N or L + q_lens keys, aligned at the end,
                   `window_left` = window - 1
    tree           the prefix without a mask, the draft slots as in `packages`
    sinks          folded in by log-sum-exp: the generic paged kernels accept an argument of that name and ignore it

FlashInfer divides the work on the host and the kernel reads the lengths on the device. So a call is planned for a bound
of the lengths, and nothing is read back: a part of a request past its last key is empty. `Planned.plan` does this
outside of graphs, and again when the bound has changed (`plan_replay`). Page numbers and lengths are copied into
buffers of fixed address, inside of graphs.

All calls use the `fa2` kernel of the prefill wrapper. The decode wrapper with tensor cores launches this kernel too.
The others cannot be planned for a bound: the `fa3` planner writes lengths into its list of work, and the decode kernel
without tensor cores computes parts past the end.

Written against flashinfer-python 0.7.2.post1 (`flashinfer/prefill.py`, `include/flashinfer/attention/scheduler.cuh` and
`prefill.cuh`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import specdec_kernels as kernels
from algorithms.attention.backends import packages
from algorithms.attention.backends.protocol import NO_BITS, BackendError
from specdec_kernels.checks import expect_at_least

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specdec_kernels import AttentionMetadata, AttentionShape
    from specdec_kernels.kv_index.types import FlashInferIndices

PACKAGE = "flashinfer-python"
_HEAD_DIMS = (64, 128, 256)
_LN_2 = math.log(2.0)
_PLAN_BYTES = 1 << 20
"""Device memory of one plan, whose size follows the number of rows and of multiprocessors."""
_SHORTEST_BOUND = 512


def rounded_bound(length: int) -> int:
    """A bound of `length` keys that changes rarely while requests grow: 4, 5, 6 or 7 times a power of two."""
    step = 1 << max(length - 1, _SHORTEST_BOUND - 1).bit_length() - 3
    return -(-max(length, _SHORTEST_BOUND) // step) * step


class Call(NamedTuple):
    """What FlashInfer plans for besides the bound of the lengths."""

    batch: int
    max_pages: int
    shape: AttentionShape
    causal: bool
    window: int | None
    soft_cap: float | None
    scale: float


class FlashInferPlan(NamedTuple):
    """A call and what its buffers must hold."""

    metadata: AttentionMetadata
    draft: AttentionMetadata | None
    planned: Planned
    pages: FlashInferIndices


class Planned:
    """FlashInfer's object for one kind of call. Captured launches read its buffers and its plan at their addresses."""

    def __init__(self, call: Call, workspace: Tensor) -> None:
        import torch

        from specdec_kernels.kv_index.types import FlashInferIndices

        def numbers(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=workspace.device)

        self._call, self._device, self.bound = call, workspace.device, 0
        self._filled: FlashInferPlan | None = None
        self._buffers = FlashInferIndices(
            numbers(call.batch + 1), numbers(call.batch * call.max_pages), numbers(call.batch)
        )
        self._wrapper = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=numbers(call.batch + 1),
            paged_kv_indptr_buf=self._buffers.indptr,
            paged_kv_indices_buf=self._buffers.indices,
            paged_kv_last_page_len_buf=self._buffers.last_page_len,
            backend="fa2",
        )
        self._wrapper.reset_workspace_buffer(workspace, numbers(_PLAN_BYTES // 4).view(torch.uint8))

    def plan(self, longest: int) -> None:
        """Divide the work of requests of up to `longest` keys, unless it is divided for about that."""
        import torch

        call, shape = self._call, self._call.shape
        bound = min(rounded_bound(longest), call.max_pages * shape.page_size)
        if bound == self.bound:
            return
        if self._device.type == "cuda":
            # The copy of the last plan may still read its page-locked memory.
            torch.cuda.current_stream(self._device).synchronize()
        each = torch.arange(call.batch + 1, dtype=torch.int32)
        self._wrapper.plan(
            each * shape.num_nodes,
            each * -(-bound // shape.page_size),
            torch.empty(0, dtype=torch.int32),
            torch.full((call.batch,), (bound - 1) % shape.page_size + 1, dtype=torch.int32),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.page_size,
            causal=call.causal,
            sm_scale=call.scale,
            window_left=-1 if call.window is None else call.window - 1,
            logits_soft_cap=call.soft_cap,
            q_data_type=shape.dtype,
            kv_data_type=shape.kv_dtype,
            uniform_q_len=shape.num_nodes,
        )
        self.bound, self._filled = bound, None

    def run(self, plan: FlashInferPlan, q: Tensor, kv: Tensor, with_lse: bool) -> Any:
        """FlashInfer's result over q [B * N, H, D], after its buffers are filled for `plan`."""
        import torch

        if self._filled is not plan:
            for buffer, values in zip(self._buffers, plan.pages, strict=True):
                buffer.copy_(values)
            self._filled = plan
        return self._wrapper.run(q, (kv[0], kv[1]), out=torch.empty_like(q), return_lse=with_lse)


class FlashInferBackend(packages.PackageBackend):
    """See `Backend`."""

    name = "flashinfer"
    captures_prompts = True

    @dataclass
    class Config:
        name: str = "flashinfer"
        workspace_mb: int = 128

        def __post_init__(self) -> None:
            expect_at_least("backend.workspace_mb", self.workspace_mb, 1)

    def __init__(self, config: Config, impl: str, deterministic: bool = False) -> None:
        if deterministic:
            raise BackendError(f"backend=flashinfer {NO_BITS}; use backend=fa4")
        if reason := self.unavailable():
            raise BackendError(f"backend=flashinfer: {reason}; use backend=fa4 or backend=torch")
        self.served: dict[str, str] = {}
        self._config, self._impl = config, impl
        self._workspace: Tensor | None = None
        self._planned: dict[Call, Planned] = {}

    @staticmethod
    def unavailable() -> str | None:
        """Why the package cannot be used on this machine, or None."""
        return packages.no_device() or packages.missing("flashinfer", PACKAGE)

    def refuse(
        self, shape: AttentionShape, mode: str, window: int | None, device: torch.device, phase: str
    ) -> str | None:
        chip = packages.capability(device)
        if chip is None or chip < (8, 0):
            return f"it needs compute capability 8.0 or newer, {device} has {chip}"
        if reason := packages.half_precision_only(shape) or packages.tree_window(mode, window):
            return reason
        if shape.head_dim not in _HEAD_DIMS:
            return f"it takes head dimensions {', '.join(map(str, _HEAD_DIMS))}, got {shape.head_dim}"
        return None

    def plan(self, metadata: AttentionMetadata, shape: AttentionShape, phase: str) -> FlashInferPlan:
        import torch

        if reason := self.refuse(shape, metadata.mode, metadata.window, metadata.lengths.device, phase):
            raise BackendError(f"flashinfer: {reason}")
        self.served[phase] = self.name
        num_nodes, chain, keys = shape.num_nodes, metadata.mode == "chain", metadata.lengths
        if metadata.mode != "tree":
            # A causal call is aligned at the end, so rows that are not in use have keys too, and are masked later.
            keys = keys + (num_nodes if chain else metadata.used_slots(num_nodes))
        spare_pages = -(-num_nodes // shape.page_size)
        table = torch.nn.functional.pad(metadata.page_table.clamp(min=0), (0, spare_pages))
        scale = shape.head_dim**-0.5 if metadata.scale is None else metadata.scale
        call = Call(table.shape[0], table.shape[1], shape, chain, metadata.window, metadata.soft_cap, scale)
        planned = self._of_call(call, table.device)
        if not packages.capturing():
            planned.plan(table.shape[1] * shape.page_size if metadata.max_length is None else metadata.max_length)
        pages = kernels.flashinfer_indices(table, keys, shape.page_size, impl=self._impl)
        return FlashInferPlan(metadata, packages.draft_part(metadata, shape, self._impl), planned, pages)

    def plan_replay(self, longest: int) -> None:
        for planned in self._planned.values():
            planned.plan(longest)

    def attend(self, plan: FlashInferPlan, q: Tensor, kv: Tensor, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        found = plan.planned.run(plan, q.flatten(0, 1), kv, with_lse)
        if not with_lse:
            return found.view(q.shape), None
        return found[0].view(q.shape), found[1].view(q.shape[:3]) * _LN_2

    def _of_call(self, call: Call, device: torch.device) -> Planned:
        import torch

        if call not in self._planned:
            if packages.capturing():
                raise BackendError("flashinfer: a call was captured that no warm-up had made")
            if self._workspace is None:
                self._workspace = torch.empty(self._config.workspace_mb << 20, dtype=torch.uint8, device=device)
            self._planned[call] = Planned(call, self._workspace)
        return self._planned[call]
