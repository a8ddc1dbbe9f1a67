"""`backend=fa4`: the project's own paged attention in Triton, and the real FlashAttention-4 on request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import specdec_kernels as kernels
from algorithms.attention.backends.flash_attention_4 import FlashAttention4, FlashAttentionPlan
from algorithms.attention.backends.protocol import NO_BITS, Backend, BackendError, LayerInputs, Reason
from algorithms.checked import Between, Checked

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specdec_kernels import AttentionMetadata, AttentionShape, TileSchedule


class TritonPlan(NamedTuple):
    """A call of `paged_attention` without its queries and keys."""

    metadata: AttentionMetadata
    tile_schedule: TileSchedule | None
    cut: Mapping[str, Any]
    """Split-K arguments of `plan_attention` and `paged_attention`."""


class TritonBackend(Backend):
    """Online softmax in base 2, packed GQA rows, split-KV; see `specdec_kernels.attention`."""

    name = "fa4"
    captures_prompts = True

    @dataclass
    class Config(Checked):
        GROUP = "backend."
        name: str = "fa4"
        split_tokens: Annotated[int | None, Between(16)] = None
        """Fewest KV tokens per split; None takes the static table's value for the chip."""
        dispatch: Annotated[str, ("triton", "auto", "flash_attention_4")] = "triton"
        """`triton`: the project's kernel for every call. `flash_attention_4`: the package for every call; a call is
        refused where the package is missing or cannot do it. `auto`: the package for prompts where it is installed and
        able, else Triton. The package has no split keys on Hopper, so verifying drafts stays with Triton."""
        tile_schedule: bool | None = None
        """Whether a persistent grid reads a tile schedule made on the device once per forward, which a captured graph
        with a wide `max_length` needs; None: on a GPU. In the interpreter it is one more kernel."""

    def __init__(self, config: Config, impl: str, deterministic: bool = False) -> None:
        self.deterministic = deterministic
        if deterministic and config.dispatch != "triton":
            raise BackendError(f"backend.dispatch={config.dispatch} {NO_BITS}; use backend.dispatch=triton")
        if deterministic and impl == "reference":
            raise BackendError(f"runtime.impl=reference {NO_BITS}; use runtime.impl=triton")
        self.served: dict[str, str] = {}
        self._config, self._impl = config, impl
        self._package = FlashAttention4(impl)
        if config.dispatch == "flash_attention_4" and (reason := FlashAttention4.unavailable()):
            raise BackendError(f"backend.dispatch=flash_attention_4: {reason}; use backend.dispatch=triton")

    def refuse(self, shape: AttentionShape, mode: str, window: int | None, device: torch.device, phase: str) -> Reason:
        """Triton takes the shapes of `paged_attention`; the package refuses more."""
        if self._config.dispatch != "flash_attention_4":
            return shape.problem
        return self._package.refuse(shape, mode, window, device, phase)

    def plan(self, metadata: AttentionMetadata, shape: AttentionShape, phase: str) -> TritonPlan | FlashAttentionPlan:
        note, dispatch = "", self._config.dispatch
        if dispatch == "flash_attention_4" or (dispatch == "auto" and phase == "prefill"):
            reason = self._package.refuse(shape, metadata.mode, metadata.window, metadata.lengths.device, phase)
            if reason is None or dispatch != "auto":
                self.served[phase] = f"fa4: {self._package.name}"
                return self._package.plan(metadata, shape, phase)
            note = f" ({self._package.name} not used: {reason})"
        self.served[phase] = self._own_name + note
        cut = self._cut(phase)
        listed = self._lists(metadata)
        tile_schedule = kernels.plan_attention(metadata, shape, **cut, impl=self._impl) if listed else None
        return TritonPlan(metadata, tile_schedule, cut)

    def _cut(self, phase: str) -> dict[str, Any]:
        """Split-K of a forward. A chunk of prompts fills the chip unsplit; its partial results would take memory."""
        split_tokens = self._config.split_tokens
        if self.deterministic and phase != "draft":
            return dict(split_tokens=split_tokens, batch_invariant=True, in_order=phase == "prefill" or None)
        if split_tokens is None and phase == "prefill":
            split_tokens = kernels.UNSPLIT
        return dict(split_tokens=split_tokens)

    def plan_levels(
        self, levels: Sequence[AttentionMetadata], shape: AttentionShape, phase: str
    ) -> list[TritonPlan] | None:
        if self._config.dispatch == "flash_attention_4" or not levels:
            return None
        self.served[phase] = self._own_name
        cut = self._cut("draft")
        if not self._lists(levels[0]):
            return [TritonPlan(call, None, cut) for call in levels]
        length_step, width_step = (1, 0) if levels[0].mode == "chain" else (0, shape.num_nodes)
        lists = kernels.plan_levels(
            levels[0], shape, len(levels), length_step=length_step, width_step=width_step, **cut, impl=self._impl
        )
        return [TritonPlan(call, each, cut) for call, each in zip(levels, lists, strict=True)]

    @property
    def _own_name(self) -> str:
        return f"fa4: {'triton' if self._impl != 'reference' else 'reference'}"

    def _lists(self, metadata: AttentionMetadata) -> bool:
        return metadata.lengths.is_cuda if self._config.tile_schedule is None else self._config.tile_schedule

    def run(self, plan: TritonPlan | FlashAttentionPlan, layer: LayerInputs) -> Tensor:
        if isinstance(plan, FlashAttentionPlan):
            return self._package.run(plan, layer)
        k_scale, v_scale = layer.scales or (1.0, 1.0)
        return kernels.paged_attention(
            layer.q,
            layer.kv,
            plan.metadata,
            sinks=layer.sinks,
            k_scale=k_scale,
            v_scale=v_scale,
            tile_schedule=plan.tile_schedule,
            **plan.cut,
            out=layer.out,
            impl=self._impl,
        )
