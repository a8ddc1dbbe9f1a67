"""`backend=flashinfer`: FlashInfer's paged prefill wrapper for prompts, decode, chain, block and tree calls.

    chain, block   causal or not over q_len rows and L + q_len keys, aligned at the end, `window_left` = window - 1
    tree           `custom_mask`, a dense boolean q_len x (L + draft slots) per request, by FlashInfer's `fa2` kernel;
                   `fa3` takes no mask. A window over a tree goes by depth and is part of the mask
    sinks          folded in by log-sum-exp: the generic paged kernels accept an argument of that name and ignore it

`plan` reads lengths back to the host, as FlashInfer's own planner does, so it cannot be captured in a CUDA graph. Rows
that are not in use are left out. A FlashInfer object keeps only its last plan, so `run` plans again after another
forward has used the object.

Written against flashinfer-python 0.7.2.post1 (`flashinfer/prefill.py`); the packed form of the mask is not used because
its offsets are taken for bits there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import specdec_kernels as kernels
from algorithms.attention.backends import packages
from algorithms.attention.backends.protocol import NO_BITS, BackendError, Reason
from algorithms.checked import Between, Checked

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specdec_kernels import AttentionMetadata, AttentionShape

_HEAD_DIMS = (64, 128, 256)
_LN_2 = math.log(2.0)


class FlashInferPlan(NamedTuple):
    """Arguments of FlashInfer's `plan`, None where no request has rows."""

    masked: bool
    kernel: str
    """FlashInfer's own backend of this call."""
    rows: Tensor | None
    """Flat indices of the rows of a [B * N] query that take part; None: all."""
    arguments: dict[str, Any] | None


class FlashInferBackend(packages.PackageBackend):
    """See `Backend`. Its planner reads lengths back, so no step of it is captured."""

    name, package, module = "flashinfer", "flashinfer-python", "flashinfer"
    capturable = False

    @dataclass
    class Config(Checked):
        GROUP = "backend."
        capturable: ClassVar[bool] = False
        name: str = "flashinfer"
        kernel: Annotated[str, ("auto", "fa2", "fa3")] = "auto"
        """For calls without a tree; `auto`: FlashInfer's choice for prompts, `fa2`, which splits keys, for steps."""
        workspace_mb: Annotated[int, Between(1)] = 128

    def __init__(self, config: Config, impl: str, deterministic: bool = False) -> None:
        if deterministic:
            raise BackendError(f"backend=flashinfer {NO_BITS}; use backend=fa4")
        if reason := self.unavailable():
            raise BackendError(f"backend=flashinfer: {reason}; use backend=fa4 or backend=torch")
        self.served: dict[str, str] = {}
        self._config, self._impl = config, impl
        self._wrappers: dict[tuple[bool, str], Any] = {}
        self._active: dict[tuple[bool, str], FlashInferPlan] = {}

    def refuse(self, shape: AttentionShape, mode: str, window: int | None, device: torch.device, phase: str) -> Reason:
        chip = packages.capability(device)
        if chip is None or chip < (8, 0):
            return f"it needs compute capability 8.0 or newer, {device} has {chip}"
        if reason := packages.half_precision_only(shape):
            return reason
        if shape.head_dim not in _HEAD_DIMS:
            return f"it takes head dimensions {', '.join(map(str, _HEAD_DIMS))}, got {shape.head_dim}"
        return None

    def plan(self, metadata: AttentionMetadata, shape: AttentionShape, phase: str) -> FlashInferPlan:
        """Reads lengths back. A request longer than its pages or `max_length` raises ValueError."""
        import torch

        if reason := self.refuse(shape, metadata.mode, metadata.window, metadata.lengths.device, phase):
            raise BackendError(f"flashinfer: {reason}")
        self.served[phase] = self.name
        used, drafted = metadata.used_rows(shape.num_nodes), metadata.used_slots(shape.num_nodes)
        lengths_host, used_host, drafted_host = torch.stack([metadata.lengths, used, drafted]).tolist()
        keys_host = [length + draft for length, draft in zip(lengths_host, drafted_host, strict=True)]
        live = [row for row, count in enumerate(used_host) if count]
        # Rows are aligned at the last key, so a request cannot be split as `paged_attention` splits it.
        capacity = metadata.page_table.shape[1] * shape.page_size
        room, most = min(metadata.max_length or capacity, capacity), max((keys_host[row] for row in live), default=0)
        if most > room:
            raise ValueError(f"lengths: expected at most {room} keys per request, draft included, got {most}")
        arguments = None
        if live:
            chosen = torch.tensor(live, device=used.device)
            keys = (metadata.lengths + drafted)[chosen]
            arguments = self._arguments(metadata.of_requests(chosen), shape, used[chosen], keys)
        masked, rows = metadata.mode == "tree", _rows(used_host, shape.num_nodes, used.device)
        splits = masked or (phase != "prefill" and self._config.kernel == "auto")
        planned = FlashInferPlan(masked, "fa2" if splits else self._config.kernel, rows, arguments)
        if live:
            self._activate(planned)
        return planned

    def run_with_lse(
        self, plan: FlashInferPlan, q: Tensor, kv: Tensor, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`run`, and lse [B, N, H] float32, natural logarithm, sinks included; -inf for rows past `q_lens`."""
        import torch

        from algorithms.attention.backends.states import add_sinks

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

    def _arguments(
        self, metadata: AttentionMetadata, shape: AttentionShape, used: Tensor, keys: Tensor
    ) -> dict[str, Any]:
        """Input of FlashInfer's plan; every request has rows."""
        import torch

        pages = kernels.flashinfer_indices(metadata.page_table, keys, shape.page_size, impl=self._impl)
        masked = metadata.mode == "tree"
        return dict(
            qo_indptr=torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0)),
            paged_kv_indptr=pages.indptr,
            paged_kv_indices=pages.indices,
            paged_kv_last_page_len=pages.last_page_len,
            num_qo_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim_qk=shape.head_dim,
            page_size=shape.page_size,
            custom_mask=_mask(metadata, shape.num_nodes, used, keys) if masked else None,
            causal=metadata.mode == "chain",
            sm_scale=shape.head_dim**-0.5 if metadata.scale is None else metadata.scale,
            window_left=-1 if masked or metadata.window is None else metadata.window - 1,
            logits_soft_cap=metadata.soft_cap,
            q_data_type=shape.dtype,
            kv_data_type=shape.kv_dtype,
        )

    def _activate(self, plan: FlashInferPlan) -> Any:
        """FlashInfer's object with this plan in it, another one for masked calls: it keeps its first plan's kernel."""
        import torch

        assert plan.arguments is not None
        key = (plan.masked, plan.kernel)
        if key not in self._wrappers:
            device = plan.arguments["qo_indptr"].device
            workspace = torch.empty(self._config.workspace_mb << 20, dtype=torch.uint8, device=device)
            kind = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
            self._wrappers[key] = kind(workspace, "NHD", backend=plan.kernel)
        wrapper = self._wrappers[key]
        if self._active.get(key) is not plan:
            wrapper.plan(**plan.arguments)
            self._active[key] = plan
        return wrapper


def _rows(used: list[int], num_nodes: int, device: torch.device) -> Tensor | None:
    """Flat indices of the rows in use, None if that is all of them."""
    import torch

    if all(count == num_nodes for count in used):
        return None
    places = [row * num_nodes + node for row, count in enumerate(used) for node in range(count)]
    return torch.tensor(places, dtype=torch.int64, device=device)


def _mask(metadata: AttentionMetadata, num_nodes: int, used: Tensor, keys: Tensor) -> Tensor:
    """Flat booleans, request by request its q_len x kv_len visibility in row-major order."""
    import torch

    from specdec_kernels.attention import visible_keys

    width = int(keys.max())
    row, key = torch.arange(num_nodes, device=keys.device), torch.arange(width, device=keys.device)
    inside = (row < used[:, None])[:, :, None] & (key < keys[:, None])[:, None]
    return visible_keys(metadata, num_nodes, width)[inside]
