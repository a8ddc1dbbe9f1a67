"""`backend=flashinfer`: FlashInfer's paged prefill wrapper for prompts, decode, chain, block and tree calls.

    chain, block   causal or not over q_len rows and L + q_len keys, aligned at the end, `window_left` = window - 1
    tree           a packed mask of q_len x (L + draft slots) bits a request, by FlashInfer's `fa2` kernel; `fa3` takes
                   no mask. A window over a tree or a block is part of the mask
    sinks          folded in by log-sum-exp: the generic paged kernels accept an argument of that name and ignore it

A step's call is planned once for its shape, on the host and outside of graphs, and replayed for every length. Page
numbers, lengths and masks are in buffers of fixed address, which a forward fills before its layers. `fa2` lays out
partial results by the number of chunks of the actual keys, and merges by the number that was planned, so a plan for
other lengths is wrong. A forward therefore also writes the size of a chunk, the places of partial results and the tiles
that run into the plan. A call that fills the chip is planned without chunks, and then depends on its rows alone.
The kernel reads lengths before it waits for its predecessor, so programmatic dependent launch is off. All rows of a
request take part, and those that are not in use are cleared later.

Prompts are not captured: `plan` reads their lengths back to the host, and splits of keys follow them.

Written against flashinfer-python 0.7.2.post1 (`flashinfer/prefill.py`, `include/flashinfer/attention/scheduler.cuh` and
`prefill.cuh`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import specdec_kernels as kernels
from algorithms.attention.backends import packages
from algorithms.attention.backends.packages import add_sinks
from algorithms.attention.backends.protocol import NO_BITS, BackendError, LayerInputs, Reason
from algorithms.checked import Between, Checked
from algorithms.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_kernels import AttentionMetadata, AttentionShape, FlashInferChunks

_HEAD_DIMS = (64, 128, 256)
_LN_2 = math.log(2.0)
_PLAN_BYTES = 1 << 20
"""Device memory of the plan of a step's call, whose size follows the number of rows and of multiprocessors."""
_ANY_PAGES = 1 << 16
"""Pages of a request that steps are planned for: enough for as many chunks as fill the chip."""


class PlanLayout(NamedTuple):
    """FlashInfer's `PrefillPlanInfo`: sizes, and offsets of arrays in the memory of a plan, in bytes."""

    tiles: int
    rows: int
    rows_at: int
    row_tile: int
    request_at: int
    row_tile_at: int
    chunk_at: int
    ends_at: int
    begins_at: int
    size_at: int
    values_at: int
    sums_at: int
    runs_at: int
    in_graphs: int
    splits: int

    def chunks(self, plan: Tensor, batch: int) -> FlashInferChunks:
        """How keys are split, in the memory `plan`; the tiles' requests and chunks are copies."""

        def numbers(at: int, count: int) -> Tensor:
            return plan[at : at + 4 * count].view(torch.int32)

        runs = plan[self.runs_at : self.runs_at + self.tiles]
        request, chunk = (numbers(at, self.tiles).masked_fill(runs == 0, -1) for at in (self.request_at, self.chunk_at))
        begins, ends = numbers(self.begins_at, batch + 1), numbers(self.ends_at, self.rows + 1)
        return kernels.FlashInferChunks(request, chunk, numbers(self.size_at, 1), begins, ends, runs)


class StepCall(NamedTuple):
    """What a step's call is planned for."""

    batch: int
    columns: int
    """Most pages of a request."""
    shape: AttentionShape
    masked: bool
    causal: bool
    window: int | None
    soft_cap: float | None
    scale: float


class StepPlan(NamedTuple):
    """A call of a step: FlashInfer's object, and what its buffers must hold."""

    planned: PlannedCall
    metadata: AttentionMetadata
    keys: Tensor
    unused: Tensor | None
    """[B, N] bool: rows past `q_lens`; None: there are none."""


class PromptPlan(NamedTuple):
    """Arguments of FlashInfer's `plan`, None where no request has rows."""

    rows: Tensor | None
    """Flat indices of the rows of a [B * N] query that take part; None: all."""
    arguments: dict[str, Any] | None


class PlannedCall:
    """FlashInfer's object for one kind of call. Captured launches read its plan and its buffers at their addresses."""

    def __init__(self, call: StepCall, workspace: Tensor, impl: str) -> None:
        def numbers(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=workspace.device)

        batch, columns, shape = call[:3]
        self._call, self._impl = call, impl
        self._filled: StepPlan | None = None
        self._pages = kernels.FlashInferIndices(numbers(batch + 1), numbers(batch * columns), numbers(batch))
        buffers = dict(
            qo_indptr_buf=numbers(batch + 1),
            paged_kv_indptr_buf=self._pages.indptr,
            paged_kv_indices_buf=self._pages.indices,
            paged_kv_last_page_len_buf=self._pages.last_page_len,
        )
        if call.masked:
            row_bytes = -(-shape.num_nodes * columns * shape.page_size // 8)
            self._mask = numbers(0).new_empty(batch, row_bytes, dtype=torch.uint8)
            starts = torch.arange(batch + 1, dtype=torch.int32, device=workspace.device) * row_bytes
            buffers |= dict(custom_mask_buf=self._mask.view(-1), mask_indptr_buf=starts)
        kind = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        self.wrapper = kind(workspace, "NHD", use_cuda_graph=True, backend="fa2", **buffers)
        memory = numbers(_PLAN_BYTES // 4).view(torch.uint8)
        self.wrapper.reset_workspace_buffer(workspace, memory)
        self._plan(splits=True)
        layout = PlanLayout(*map(int, self.wrapper._plan_info))
        self._chunks = layout.chunks(memory, batch)
        self._limit = None if call.window is None else call.window - 1 + layout.row_tile
        self._most = int(self._chunks.chunk.max()) + 1
        if self._most == 1:
            self._plan(splits=False)

    def _plan(self, splits: bool) -> None:
        call, shape = self._call, self._call.shape
        each = torch.arange(call.batch + 1, dtype=torch.int32)
        self.wrapper.plan(
            qo_indptr=each * shape.num_nodes,
            paged_kv_indptr=each * _ANY_PAGES,
            paged_kv_indices=each[:0],
            paged_kv_last_page_len=torch.ones(call.batch, dtype=torch.int32),
            causal=call.causal,
            window_left=-1 if call.window is None else call.window - 1,
            disable_split_kv=not splits,
            uniform_q_len=shape.num_nodes,
            **_sizes(shape, call.soft_cap, call.scale),
        )

    def fill(self, plan: StepPlan) -> None:
        """Let the buffers hold pages, lengths, chunks and mask of `plan`."""
        if self._filled is plan:
            return
        self._filled, metadata, impl = plan, plan.metadata, self._impl
        page_size, columns = self._call.shape.page_size, self._call.columns
        kernels.flashinfer_indices(metadata.page_table, plan.keys, page_size, columns, self._pages, impl=impl)
        if self._most > 1:
            kernels.flashinfer_chunks(plan.keys, self._most, self._chunks, self._limit, impl=impl)
        if self._call.masked:
            kernels.flashinfer_mask(
                _mask_words(metadata, self._call.shape.num_nodes),
                metadata.lengths,
                plan.keys,
                columns * page_size,
                window=metadata.window,
                depths=metadata.depths,
                row_depths=metadata.row_depths,
                out=self._mask,
                impl=impl,
            )


class FlashInferBackend(packages.PackageBackend):
    """See `Backend`."""

    name, package, module = "flashinfer", "flashinfer-python", "flashinfer"

    @dataclass
    class Config(Checked):
        GROUP = "backend."
        name: str = "flashinfer"
        kernel: Annotated[str, ("auto", "fa2", "fa3")] = "auto"
        """For prompts; `auto`: FlashInfer's choice. Steps take `fa2`."""
        workspace_mb: Annotated[int, Between(1)] = 128

    def __init__(self, config: Config, impl: str, deterministic: bool = False) -> None:
        if deterministic:
            raise BackendError(f"backend=flashinfer {NO_BITS}; use backend=fa4")
        if reason := self.unavailable():
            raise BackendError(f"backend=flashinfer: {reason}; use backend=fa4 or backend=torch")
        self.served: dict[str, str] = {}
        self._config, self._impl = config, impl
        self._workspace: Tensor | None = None
        self._planned: dict[StepCall, PlannedCall] = {}
        self._prompts: Any = None
        self._active: PromptPlan | None = None

    def refuse(self, shape: AttentionShape, mode: str, window: int | None, device: torch.device, phase: str) -> Reason:
        chip = packages.capability(device)
        if chip is None or chip < (8, 0):
            return f"it needs compute capability 8.0 or newer, {device} has {chip}"
        if reason := packages.half_precision_only(shape):
            return reason
        if shape.head_dim not in _HEAD_DIMS:
            return f"it takes head dimensions {', '.join(map(str, _HEAD_DIMS))}, got {shape.head_dim}"
        return None

    def plan(self, metadata: AttentionMetadata, shape: AttentionShape, phase: str) -> StepPlan | PromptPlan:
        """Of prompts, lengths are read back; one longer than its pages or `max_length` raises ValueError."""
        if reason := self.refuse(shape, metadata.mode, metadata.window, metadata.lengths.device, phase):
            raise BackendError(f"flashinfer: {reason}")
        self.served[phase] = self.name
        if phase == "prefill" and metadata.mode == "chain":
            return self._plan_prompts(metadata, shape)
        return self._plan_step(metadata, shape)

    def run(self, plan: StepPlan | PromptPlan, layer: LayerInputs) -> Tensor:
        if isinstance(plan, PromptPlan) or layer.sinks is not None:
            return super().run(plan, layer)
        out, unused = self._run_step(plan, layer.q, layer.kv, return_lse=False), plan.unused
        return out if unused is None else out.masked_fill_(unused[..., None, None], 0.0)

    def run_with_lse(
        self, plan: StepPlan | PromptPlan, q: Tensor, kv: Tensor, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`run`, and lse [B, N, H] float32, natural logarithm, sinks included; -inf for rows past `q_lens`."""
        if isinstance(plan, PromptPlan):
            return self._run_prompts(plan, q, kv, sinks)
        out, base_2 = self._run_step(plan, q, kv, return_lse=True)
        lse = base_2.view(q.shape[:3]) * _LN_2
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        if plan.unused is None:
            return out, lse
        unused = plan.unused[..., None]
        return out.masked_fill(unused[..., None], 0.0), lse.masked_fill(unused, float("-inf"))

    def _plan_step(self, metadata: AttentionMetadata, shape: AttentionShape) -> StepPlan:
        table, chain, page_size = metadata.page_table, metadata.mode == "chain", shape.page_size
        columns, masked = table.shape[1], not chain and (metadata.mode == "tree" or metadata.window is not None)
        if chain:
            # Rows are aligned at the last key, so rows that are not in use have keys too.
            keys, columns = metadata.lengths + shape.num_nodes, columns + -(-shape.num_nodes // page_size)
        else:
            keys = (metadata.lengths + metadata.used_slots(shape.num_nodes)).clamp(1, columns * page_size)
        scale = shape.head_dim**-0.5 if metadata.scale is None else metadata.scale
        window = None if masked else metadata.window
        call = StepCall(len(table), columns, shape, masked, chain, window, metadata.soft_cap, scale)
        if call not in self._planned:
            self._planned[call] = PlannedCall(call, self._buffer(table.device), self._impl)
        unused = None
        if metadata.q_lens is not None:
            unused = torch.arange(shape.num_nodes, device=table.device) >= metadata.q_lens[:, None]
        plan = StepPlan(self._planned[call], metadata, keys, unused)
        plan.planned.fill(plan)
        return plan

    def _run_step(self, plan: StepPlan, q: Tensor, kv: Tensor, return_lse: bool) -> Any:
        """Out [B, N, H, D], and lse [B * N, H] in base 2 if asked for."""
        plan.planned.fill(plan)
        out, flat = torch.empty_like(q), q.flatten(0, 1)
        found = plan.planned.wrapper.run(
            flat, (kv[0], kv[1]), out=out.view(flat.shape), return_lse=return_lse, enable_pdl=False
        )
        return (out, found[1]) if return_lse else out

    def _plan_prompts(self, metadata: AttentionMetadata, shape: AttentionShape) -> PromptPlan:
        used = metadata.used_rows(shape.num_nodes)
        lengths_host, used_host = torch.stack([metadata.lengths, used]).tolist()
        live = [row for row, count in enumerate(used_host) if count]
        # Rows are aligned at the last key, so a request cannot be split as `paged_attention` splits it.
        capacity = metadata.page_table.shape[1] * shape.page_size
        room = min(metadata.max_length or capacity, capacity)
        most = max((lengths_host[row] + used_host[row] for row in live), default=0)
        if most > room:
            raise ValueError(f"lengths: expected at most {room} keys per request, draft included, got {most}")
        if not live:
            return PromptPlan(None, None)
        chosen = torch.tensor(live, device=used.device)
        part, rows = metadata.of_requests(chosen), used[chosen]
        pages = kernels.flashinfer_indices(part.page_table, part.lengths + rows, shape.page_size, impl=self._impl)
        arguments = dict(
            qo_indptr=torch.nn.functional.pad(rows.cumsum(0, dtype=torch.int32), (1, 0)),
            paged_kv_indptr=pages.indptr,
            paged_kv_indices=pages.indices,
            paged_kv_last_page_len=pages.last_page_len,
            causal=True,
            window_left=-1 if metadata.window is None else metadata.window - 1,
            **_sizes(shape, metadata.soft_cap, shape.head_dim**-0.5 if metadata.scale is None else metadata.scale),
        )
        in_use = torch.arange(shape.num_nodes, device=used.device) < used[:, None]
        all_rows = min(used_host) == shape.num_nodes
        planned = PromptPlan(None if all_rows else in_use.flatten().nonzero().squeeze(1), arguments)
        self._activate(planned)
        return planned

    def _run_prompts(self, plan: PromptPlan, q: Tensor, kv: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        flat = q.flatten(0, 1)
        out = torch.zeros_like(flat)
        lse = flat.new_full(flat.shape[:2], float("-inf"), dtype=torch.float32)
        if plan.arguments is not None:
            queries = flat if plan.rows is None else flat[plan.rows]
            part, base_2 = self._activate(plan).run(queries, (kv[0], kv[1]), return_lse=True)
            part_lse = base_2 * _LN_2
            if sinks is not None:
                part, part_lse = add_sinks(part, part_lse, sinks)
            if plan.rows is None:
                out, lse = part, part_lse
            else:
                out[plan.rows], lse[plan.rows] = part, part_lse
        return out.view(q.shape), lse.view(q.shape[:3])

    def _activate(self, plan: PromptPlan) -> Any:
        """FlashInfer's object for prompts with this plan in it: it keeps only the last one."""
        assert plan.arguments is not None
        if self._prompts is None:
            kind = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
            workspace = self._buffer(plan.arguments["qo_indptr"].device)
            self._prompts = kind(workspace, "NHD", backend=self._config.kernel)
        if self._active is not plan:
            self._prompts.plan(**plan.arguments)
            self._active = plan
        return self._prompts

    def _buffer(self, device: torch.device) -> Tensor:
        """Partial results of a call, shared by all calls, which follow each other."""
        if self._workspace is None:
            self._workspace = torch.empty(self._config.workspace_mb << 20, dtype=torch.uint8, device=device)
        return self._workspace


def _sizes(shape: AttentionShape, soft_cap: float | None, scale: float) -> dict[str, Any]:
    """Arguments of FlashInfer's `plan` that follow from the model."""
    return dict(
        num_qo_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim_qk=shape.head_dim,
        page_size=shape.page_size,
        sm_scale=scale,
        logits_soft_cap=soft_cap,
        q_data_type=shape.dtype,
        kv_data_type=shape.kv_dtype,
    )


def _mask_words(metadata: AttentionMetadata, num_nodes: int) -> Tensor:
    """The mask of a tree; of a block, all slots."""
    if metadata.mask is not None:
        return metadata.mask
    return metadata.lengths.new_full((len(metadata.lengths), num_nodes, -(-num_nodes // 64)), -1)
