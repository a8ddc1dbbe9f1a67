"""The contract of attention backends: `plan` once per forward, `run` once per layer, `refuse` before either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import specdec_kernels as kernels

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from algorithms.models.config import DecoderConfig
    from specdec_kernels import AttentionMetadata, AttentionShape

NO_BITS = "does not promise the same bits for a row among others, which runtime.deterministic=true asks for"
Reason = str | None
"""Why something cannot be served; None: it can."""
FORWARD_PHASES = ("prefill", "decode", "verify", "draft")
"""The purpose of a forward: prompts, one token per request, drafted tokens of the target; everything of a drafter."""


class LayerInputs(NamedTuple):
    """One layer of a forward: q [B, N, H, D], kv [2, pages, page_size, H_kv, D], sinks [H] float32, and `scales` of the
    stored keys and values, [H_kv] float32 each, None: 1. The result may be written to `out`, contiguous."""

    q: Tensor
    kv: Tensor
    sinks: Tensor | None = None
    scales: tuple[Tensor, Tensor] | None = None
    out: Tensor | None = None


class BackendError(ValueError):
    """A backend that cannot run here, or cannot serve a call; the message says why."""


class Backend(Protocol):
    """Computes attention of new tokens over [committed prefix; new tokens], whose KV is already stored.

    A class has a `Config` dataclass and is built as `cls(config, impl, deterministic)`; the constructor raises
    `BackendError` where the backend cannot run, or cannot be `deterministic`: give a row the same bits in every phase
    but `draft`, regardless of the rest of the batch. An instance serves one stream of calls. Steps are captured in CUDA
    graphs, after a warm-up that has made each call once, so `plan` and `run` read nothing back.
    """

    name: str
    captures_prompts: bool = False
    """Whether prompts are captured too; elsewhere their `plan` may read lengths back."""
    deterministic: bool = False
    """Whether it was constructed so."""
    served: dict[str, str]
    """Phase -> what computed it in this run, for the records."""

    def refuse(self, shape: AttentionShape, mode: str, window: int | None, device: torch.device, phase: str) -> Reason:
        """Why calls of this kind cannot be served, or None. Called before weights load."""

    def check(
        self,
        config: DecoderConfig,
        modes: Mapping[str, str],
        page_size: int,
        dtype: Any,
        device: Any,
        asker: str = "the target",
        kv_dtype: Any = None,
    ) -> None:
        """Raise `BackendError` where a layer of the model `asker` cannot be served in a phase, of `modes` by phase, or
        where no cache can hold its heads. `kv_dtype` of stored keys and values: None is `dtype`."""
        if config.mixings and None not in config.mixings:
            return
        if (problem := kernels.head_dim_problem(config.head_dim)) is not None:
            raise BackendError(f"{asker}: no KV cache can hold its keys: {problem}")
        sizes = (1, config.num_heads, config.num_kv_heads, config.head_dim, page_size)
        shape = kernels.AttentionShape(*sizes, dtype, kv_dtype or dtype)
        for phase, mode in modes.items():
            for window in dict.fromkeys(config.sliding_windows or (None,)):
                if (reason := self.refuse(shape, mode, window, device, phase)) is not None:
                    others = " or ".join(name for name in ("fa4", "torch") if name != self.name)
                    raise BackendError(
                        f"backend={self.name} cannot serve {phase} of {asker} here: {reason}; use backend={others}"
                    )

    def plan(self, metadata: AttentionMetadata, shape: AttentionShape, phase: str) -> Any:
        """Prepare what all layers of a forward share; raises `BackendError` with the reason of `refuse`. The result
        does not change. `phase` is one of `FORWARD_PHASES`."""

    def plan_levels(
        self, levels: Sequence[AttentionMetadata], shape: AttentionShape, phase: str
    ) -> Sequence[Any] | None:
        """Plans of all `levels` at once, forwards that a drafter makes one after another; None where a plan needs more
        than is known before the first of them. From one to the next the lengths of a chain grow by 1, the `tree_width`
        of a tree by its rows. Masks and depths are filled when a forward is made, not when it is planned."""
        return None

    def run(self, plan: Any, layer: LayerInputs) -> Tensor:
        """[B, N, H, D], in `layer.out` or elsewhere; zeros in rows past `q_lens`."""
