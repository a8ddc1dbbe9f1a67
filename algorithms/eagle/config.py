"""Shapes and conventions of EAGLE and EAGLE-3 heads, read from and written to `config.json`.

Both are published as a Llama or Qwen3 config of the draft layers. EAGLE (arXiv 2401.15077) adds at most `bias`: whether
`fc` has one, true by default. EAGLE-3 (arXiv 2503.01840) adds the draft vocabulary and the target layers. Its writers
differ in the fields of `Eagle3Config`; `algorithms.eagle.loading` turns their keys into those that are read here.

A layer id means the output of that layer, and `EMBEDDING_LAYER` that of the embedding. SafeAILab's code and SGLang read
the inputs of layers 2, n/2 and n - 3 of a target of n layers, so the defaults are 1, n/2 - 1 and n - 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from algorithms.checked import Checked
from algorithms.drafting.level_drafter import NORMED, RAW, STREAMS
from algorithms.models.config import EMBEDDING_LAYER, DecoderConfig
from algorithms.models.config_keys import nested
from specdec_kernels.checks import expect_between

NUM_FEATURES = 3  # target layers of a head that names none
LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"
JOINT, EACH = FEATURE_NORMS = ("joint", "each")


@dataclass(frozen=True)
class EagleConfig:
    decoder: DecoderConfig
    fc_bias: bool = True

    @property
    def draft_vocab_size(self) -> int:
        return self.decoder.vocab_size

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> EagleConfig:
        """Read a published `config.json`; ValueError names a missing or unsupported key."""
        return cls(DecoderConfig.from_hf(config), bool(config.get("bias", True)))

    def to_hf(self) -> dict[str, Any]:
        return {**self.decoder.to_hf(), "architectures": ["LlamaForCausalLMEagle"], "bias": self.fc_bias}


def default_aux_layer_ids(num_target_layers: int) -> tuple[int, ...]:
    """Layers whose output is the input of layers 2, n/2 and n - 3."""
    if num_target_layers < 5:
        raise ValueError(f"the default {LAYER_IDS_KEY} need a target of >= 5 layers, got {num_target_layers}")
    return (1, num_target_layers // 2 - 1, num_target_layers - 4)


@dataclass(frozen=True)
class Eagle3Config(Checked):
    """An EAGLE-3 head: the shape of its layers, with the target's vocabulary, and its conventions."""

    decoder: DecoderConfig
    draft_vocab_size: int
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...] | None
    """None: the default of the target at hand."""
    feature_norm: str | None = None
    """Norm of the features in front of `fc`: `joint` over all of them, `each` (EAGLE-3.1), or None."""
    residual: Annotated[str, STREAMS] = RAW
    """Start of the first layer's residual stream: the fused feature, or its norm."""
    feedback: Annotated[str, STREAMS] = RAW
    """Feature of the next level of a draft: the stream, or its norm (EAGLE-3.1)."""
    logits: Annotated[str, STREAMS] = NORMED
    """Input of the LM head: the norm of the stream, or the stream."""
    mask_token_id: int | None = None
    """P-EAGLE: the token of the rows that draft in one pass; None for a head that drafts token after token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        vocab_size = self.decoder.vocab_size
        expect_between("draft_vocab_size", self.draft_vocab_size, 1, vocab_size)
        expect_between("mask_token_id", self.mask_token_id, 0, vocab_size - 1, nullable=True)
        if self.aux_layer_ids == ():
            raise ValueError(f"{LAYER_IDS_KEY}: expected at least one layer, got none")
        if self.feedback == NORMED and self.logits == RAW:
            raise ValueError("logits=raw with feedback=normed: expected an LM head that reads the norm too")

    @property
    def reduced(self) -> bool:
        """Whether the head predicts a part of the vocabulary only."""
        return self.draft_vocab_size < self.decoder.vocab_size

    @property
    def num_features(self) -> int:
        return NUM_FEATURES if self.aux_layer_ids is None else len(self.aux_layer_ids)

    def layer_ids(self, num_target_layers: int) -> tuple[int, ...]:
        """The target layers that feed the head; ValueError where the target has no such layers."""
        ids = self.aux_layer_ids or default_aux_layer_ids(num_target_layers)
        if any(not EMBEDDING_LAYER <= index < num_target_layers for index in ids):
            raise ValueError(f"{LAYER_IDS_KEY}: expected 0 to {num_target_layers - 1}, got {list(ids)}")
        return ids

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Eagle3Config:
        """Read a `config.json` mapping; an entry of `eagle_config` wins over a top-level one. `norm_output` means here
        what it means to all writers with `fc_norm`, and to SpecForge before its pull request 879 without; `feedback`
        and `logits` win over it. Raises ValueError."""
        decoder, merged = DecoderConfig.from_hf(config), {**config, **nested(config, "eagle_config")}
        ids, norm_output = merged.get(LAYER_IDS_KEY), merged.get("norm_output")
        is_each, is_joint = (bool(merged.get(key)) for key in ("fc_norm", "norm_before_fc"))
        if is_each and is_joint:
            raise ValueError("fc_norm and norm_before_fc: expected one of them at most, got both")
        is_normed = is_each and bool(norm_output)
        is_raw = not is_each and norm_output is False
        return cls(
            decoder=decoder,
            draft_vocab_size=int(merged.get("draft_vocab_size") or decoder.vocab_size),
            target_hidden_size=int(merged.get("target_hidden_size") or decoder.hidden_size),
            aux_layer_ids=None if ids is None else tuple(int(index) for index in ids),
            feature_norm=EACH if is_each else JOINT if is_joint else None,
            residual=NORMED if merged.get("norm_before_residual") else RAW,
            feedback=merged.get("feedback") or (NORMED if is_normed else RAW),
            logits=merged.get("logits") or (RAW if is_raw else NORMED),
            mask_token_id=merged.get("mask_token_id"),
        )

    def to_hf(self) -> dict[str, Any]:
        result = {
            **self.decoder.to_hf(),
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
        }
        flags = {
            "fc_norm": self.feature_norm == EACH,
            "norm_before_fc": self.feature_norm == JOINT,
            "norm_before_residual": self.residual == NORMED,
            # Absent, other engines read EAGLE-3 itself: normed logits and raw feedback.
            "feedback": self.feedback == NORMED and self.feedback,
            "logits": self.logits == RAW and self.logits,
            "mask_token_id": self.mask_token_id,
        }
        result |= {key: value for key, value in flags.items() if value not in (False, None)}
        if self.feedback == NORMED:
            result["norm_output"] = True
        if self.aux_layer_ids is not None:
            result["eagle_config"] = {LAYER_IDS_KEY: list(self.aux_layer_ids), "use_aux_hidden_state": True}
        return result
