"""FlashInfer's paged prefill wrapper for decode, chain, block and tree calls.

    chain, block   causal or not over q_len rows and L + q_len keys, aligned at the end, `window_left` = window - 1
    tree           `custom_mask`, a dense boolean q_len x (L + draft slots) a request, by FlashInfer's `fa2` kernel: its
                   `fa3` takes no mask. A window over a tree goes by depth and is part of the mask
    sinks          folded in by log-sum-exp: the generic paged kernels accept an argument of that name and ignore it

`plan` reads lengths back to the host, as FlashInfer's own planner does, so neither can be captured in a CUDA graph;
unused rows are then simply left out. A plan lives in the FlashInfer object, which the next plan overwrites: `run`
plans again where another call came between.

Written against flashinfer-python 0.7.2.post1 (`flashinfer/prefill.py`); the packed form of the mask is not used because
its offsets are taken for bits there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from specdec_kernels.wrappers import contract
from specdec_kernels.wrappers.contract import AttentionCall, Needs, Unsupported

if TYPE_CHECKING:
    import torch

PACKAGE = "flashinfer-python"
KERNELS = ("auto", "fa2", "fa3")
_HEAD_DIMS = (64, 128, 256)
_LN_2 = math.log(2.0)


@dataclass(eq=False)
class FlashInferPlan:
    """Arguments of FlashInfer's `plan`, and which rows of a [B * N] query take part (None: all; empty: nothing)."""

    call: AttentionCall
    masked: bool
    rows: torch.Tensor | None
    arguments: dict[str, Any] = field(repr=False)


class FlashInferAttention:
    """See `specdec_kernels.wrappers`. `kernel` is FlashInfer's backend for calls without a mask."""

    name = "flashinfer"

    def __init__(self, kernel: str = "auto", workspace_bytes: int = 128 << 20, impl: str = "auto") -> None:
        if kernel not in KERNELS:
            raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
        if workspace_bytes < 1 << 20:
            raise ValueError(f"workspace_bytes: expected at least {1 << 20}, got {workspace_bytes}")
        self._kernel, self._workspace_bytes, self._impl = kernel, workspace_bytes, impl
        self._wrappers: dict[bool, Any] = {}
        self._active: dict[bool, FlashInferPlan] = {}

    @staticmethod
    def available() -> str | None:
        """See `AttentionWrapper`."""
        return contract.no_device() or contract.missing("flashinfer", PACKAGE)

    def refusal(self, needs: Needs) -> str | None:
        """See `AttentionWrapper`."""
        if reason := self.available():
            return reason
        chip = contract.capability(needs.device)
        if chip is None or chip < (8, 0):
            return f"it needs compute capability 8.0 or newer, {needs.device} has {chip}"
        if reason := contract.half_precision_only(needs):
            return reason
        if needs.head_dim not in _HEAD_DIMS:
            return f"it takes head dimensions {', '.join(map(str, _HEAD_DIMS))}, got {needs.head_dim}"
        return None

    def plan(self, call: AttentionCall) -> FlashInferPlan:
        """See `AttentionWrapper`. Reads lengths back. A request longer than its pages or `max_length` raises."""
        import torch

        if reason := self.refusal(call.needs):
            raise Unsupported(f"flashinfer: {reason}")
        used, drafted = call.used_rows(), call.drafted()
        lengths_host, used_host, drafted_host = torch.stack([call.lengths, used.long(), drafted.long()]).tolist()
        keys_host = [length + draft for length, draft in zip(lengths_host, drafted_host, strict=True)]
        _check_room(call, [keys for keys, rows in zip(keys_host, used_host, strict=True) if rows])
        live = [row for row, count in enumerate(used_host) if count]
        planned = FlashInferPlan(call, call.mode == "tree", _rows(call, used_host), {})
        if live:
            planned.arguments = self._arguments(call, live, used, call.lengths + drafted)
            self._activate(planned)
        return planned

    def run(self, planned: FlashInferPlan, q: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionWrapper`."""
        import torch

        from specdec_kernels.wrappers.states import add_sinks

        call, flat = planned.call, q.flatten(0, 1)
        out = torch.zeros_like(flat)
        lse = flat.new_full(flat.shape[:2], float("-inf"), dtype=torch.float32)
        if planned.arguments:
            wrapper = self._activate(planned)
            queries = flat if planned.rows is None else flat[planned.rows]
            part, base_2 = wrapper.run(queries, (kv[0], kv[1]), return_lse=True)
            part_lse = base_2 * _LN_2
            if call.sinks is not None:
                part, part_lse = add_sinks(part, part_lse, call.sinks)
            if planned.rows is None:
                out, lse = part, part_lse
            else:
                out[planned.rows], lse[planned.rows] = part, part_lse
        return out.view(q.shape), lse.view(q.shape[:3])

    def _arguments(
        self, call: AttentionCall, live: list[int], used: torch.Tensor, keys: torch.Tensor
    ) -> dict[str, Any]:
        """What FlashInfer plans with, requests without rows left out."""
        import torch

        from specdec_kernels.kv_index import flashinfer_indices

        chosen = torch.tensor(live, device=keys.device)
        table, used, keys = call.page_table[chosen].contiguous(), used[chosen], keys[chosen]
        pages = flashinfer_indices(table, keys, call.page_size, impl=self._impl)
        masked = call.mode == "tree"
        return dict(
            qo_indptr=torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0)),
            paged_kv_indptr=pages.indptr,
            paged_kv_indices=pages.indices,
            paged_kv_last_page_len=pages.last_page_len,
            num_qo_heads=call.num_heads,
            num_kv_heads=call.num_kv_heads,
            head_dim_qk=call.head_dim,
            page_size=call.page_size,
            custom_mask=_mask(call, chosen, used, keys) if masked else None,
            causal=call.mode == "chain",
            sm_scale=call.softmax_scale,
            window_left=-1 if masked or call.window is None else call.window - 1,
            logits_soft_cap=call.soft_cap,
            q_data_type=call.dtype,
            kv_data_type=call.kv_dtype or call.dtype,
        )

    def _activate(self, planned: FlashInferPlan) -> Any:
        """FlashInfer's object with this plan in it; one for masked calls and one for the others, because an object
        keeps the kernel that its first plan chose."""
        if planned.masked not in self._wrappers:
            self._wrappers[planned.masked] = self._wrapper(planned)
        wrapper = self._wrappers[planned.masked]
        if self._active.get(planned.masked) is not planned:
            wrapper.plan(**planned.arguments)
            self._active[planned.masked] = planned
        return wrapper

    def _wrapper(self, planned: FlashInferPlan) -> Any:
        import torch

        workspace = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=planned.call.lengths.device)
        kind = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        return kind(workspace, "NHD", backend="fa2" if planned.masked else self._kernel)


def _check_room(call: AttentionCall, keys: list[int]) -> None:
    """FlashInfer aligns rows at the last key, so a request cannot be cut as `paged_attention` cuts it."""
    room = min(call.max_length, call.page_table.shape[1] * call.page_size)
    if keys and max(keys) > room:
        raise ValueError(f"lengths: expected at most {room} keys a request, draft included, got {max(keys)}")


def _rows(call: AttentionCall, used: list[int]) -> torch.Tensor | None:
    """Flat indices of the rows in use, None if that is all of them."""
    import torch

    if all(count == call.num_queries for count in used):
        return None
    places = [row * call.num_queries + node for row, count in enumerate(used) for node in range(count)]
    return torch.tensor(places, dtype=torch.int64, device=call.lengths.device)


def _mask(call: AttentionCall, chosen: torch.Tensor, used: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Flat booleans, request by request its q_len x kv_len visibility in row-major order."""
    import torch

    from specdec_kernels.wrappers.visibility import visible_keys

    def of_chosen(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[chosen]

    width = int(keys.max())
    seen = visible_keys(
        call.lengths[chosen],
        used,
        call.num_queries,
        width,
        call.mode,
        mask=of_chosen(call.mask),
        tree_width=call.tree_width,
        window=call.window,
        depths=of_chosen(call.depths),
        row_depths=of_chosen(call.row_depths),
    )
    row = torch.arange(call.num_queries, device=keys.device)
    inside = (row < used[:, None])[:, :, None] & (torch.arange(width, device=keys.device) < keys[:, None])[:, None]
    return seen[inside]
