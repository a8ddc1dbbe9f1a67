"""Shape of a DFlash drafter; the keys are those of the published z-lab checkpoints (arXiv 2602.06036).

Checkpoints of others say about attention what z-lab's `layer_types` say, in keys of `dflash_config`. They are read as
vLLM reads them (`qwen3_dflash.py`): `use_swa` gives every layer a window where `layer_types` name none,
`swa_window_size` is that window, sliding layers of `layer_types` are causal, and `causal` (or `is_causal`) decides for
all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from algorithms.runtime.models.config.decoder import DecoderConfig
from algorithms.runtime.models.config.keys import required
from algorithms.runtime.models.registry import FULL, SLIDING, Windows, read_layer_types, write_layer_types
from specdec_kernels.checks import expect_at_least, expect_between

DEFAULT_BLOCK_SIZE = 16
VANILLA = "vanilla"
"""The Markov head that reads the token before alone, by the name of DSpark's configs."""


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The published rule: one draft layer reads the middle, several read evenly spaced layers 1 … N-3."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    if num_target_layers < 4:
        raise ValueError(f"default target_layer_ids need num_target_layers >= 4, got {num_target_layers}")
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers))


@dataclass(frozen=True)
class DFlashConfig:
    """Shape of a DFlash drafter: `decoder` describes its layers, sliding windows included."""

    decoder: DecoderConfig
    block_size: int
    target_layer_ids: tuple[int, ...]
    """Target layers whose output is read: the residual stream after that layer, for the last one behind the final
    norm."""
    mask_token_id: int
    """The target's token that stands for a draft; `vocab_size`, one behind the last, is a row that the drafter owns."""
    num_target_layers: int
    causal_layers: tuple[bool, ...]
    """Whether each layer is causal inside the block."""
    logit_soft_cap: float | None = None
    """Logits s of drafts become logit_soft_cap * tanh(s / logit_soft_cap)."""
    markov_rank: int = 0
    """Rank of the head that corrects a draft by the token before it; 0 is none."""

    def __post_init__(self) -> None:
        expect_at_least("block_size", self.block_size, 1)
        if len(self.causal_layers) != self.decoder.num_layers:
            raise ValueError(f"causal_layers: expected {self.decoder.num_layers} entries, got {self.causal_layers}")
        expect_between("final_logit_softcapping", self.logit_soft_cap, 0, inf, above=True, nullable=True)
        outside = [i for i in self.target_layer_ids if not 0 <= i < self.num_target_layers]
        if outside or not self.target_layer_ids:
            raise ValueError(
                f"target_layer_ids: expected 0 to {self.num_target_layers - 1}, got {list(self.target_layer_ids)}"
            )
        expect_between("mask_token_id", self.mask_token_id, 0, self.decoder.vocab_size)
        expect_at_least("markov_rank", self.markov_rank, 0)

    @property
    def owns_mask(self) -> bool:
        """Whether the mask's embedding is the drafter's own."""
        return self.mask_token_id == self.decoder.vocab_size

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DFlashConfig:
        """Read a published drafter `config.json`; an entry of `dflash_config` wins over the same top-level key."""
        merged = {**config, **(config.get("dflash_config") or {})}
        # `layer_types` alone decides about windows here, whatever `use_sliding_window` says.
        decoder = DecoderConfig.from_hf({**config, "layer_types": None, "use_sliding_window": False})
        num_target_layers = int(required(merged, "num_target_layers"))
        ids = merged.get("target_layer_ids", merged.get("layer_ids"))
        if ids is None:
            ids = default_target_layer_ids(num_target_layers, decoder.num_layers)
        windows, causal = _read_attention(merged, decoder.num_layers)
        cap = merged.get("final_logit_softcapping")
        return cls(
            decoder=replace(decoder, sliding_windows=windows),
            block_size=int(merged.get("block_size", DEFAULT_BLOCK_SIZE)),
            target_layer_ids=tuple(int(i) for i in ids),
            mask_token_id=int(required(merged, "mask_token_id")),
            num_target_layers=num_target_layers,
            causal_layers=causal,
            logit_soft_cap=None if cap is None else float(cap),
            markov_rank=_read_markov(merged),
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` mapping with the keys of the published checkpoints; ValueError where they cannot say which
        layers are causal."""
        own: dict[str, Any] = {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.target_layer_ids)}
        if self.causal_layers != tuple(map(bool, self.decoder.sliding_windows or (None,) * self.decoder.num_layers)):
            if len(set(self.causal_layers)) > 1:
                raise ValueError(f"causal_layers: expected all or none, or those that slide, got {self.causal_layers}")
            own["causal"] = self.causal_layers[0]
        if self.logit_soft_cap is not None:
            own["final_logit_softcapping"] = self.logit_soft_cap
        return {
            **replace(self.decoder, sliding_windows=()).to_hf(),
            "architectures": ["DFlashDraftModel"],
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": own,
            **({"markov_rank": self.markov_rank, "markov_head_type": VANILLA} if self.markov_rank else {}),
            **write_layer_types(self.decoder.sliding_windows, self.decoder.num_layers),
        }


def _read_markov(merged: Mapping[str, Any]) -> int:
    """Rank of the Markov head; ValueError where it reads more than the token before."""
    rank, kind = int(merged.get("markov_rank") or 0), merged.get("markov_head_type", VANILLA)
    if rank and kind != VANILLA:
        raise ValueError(f"markov_head_type '{kind}' is not supported, expected '{VANILLA}'")
    return rank


def _read_attention(merged: Mapping[str, Any], num_layers: int) -> tuple[Windows, tuple[bool, ...]]:
    """Windows of the layers, and which of them are causal inside the block."""
    layer_types = merged.get("layer_types") or [FULL] * num_layers
    causal = {merged[key] for key in ("causal", "is_causal") if merged.get(key) is not None}
    if len(causal) > 1:
        raise ValueError(f"causal and is_causal: expected one value, got {merged['causal']}, {merged['is_causal']}")
    by_layer = tuple(bool(next(iter(causal))) if causal else kind == SLIDING for kind in layer_types)
    if merged.get("use_swa") and SLIDING not in layer_types:
        layer_types = [SLIDING] * num_layers
    window = merged.get("swa_window_size") or merged.get("sliding_window")
    return read_layer_types(layer_types, window, num_layers), by_layer
