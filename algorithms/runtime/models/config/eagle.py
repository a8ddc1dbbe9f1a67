"""Shapes of EAGLE and EAGLE-3 heads, read from and written to the `config.json` of published checkpoints.

Both kinds are published as a Llama or Qwen3 config of the draft layer. EAGLE (arXiv 2401.15077) adds at most `bias`:
whether `fc` has a bias, true where the key is absent. EAGLE-3 (arXiv 2503.01840) adds `draft_vocab_size`,
`target_hidden_size`, the captured target layers, and in SpecForge `norm_output`. EAGLE-3.1 (arXiv 2605.09992) adds
`fc_norm`: each captured feature passes a norm of its own in front of `fc`.

`norm_output` has two meanings. SpecForge before its pull request 879 wrote true for EAGLE-3 itself, and false for a
head whose LM head reads the stream without a norm. EAGLE-3.1 writes true where the next level of a draft reads the
normed stream too, and its LM head always does. A head with `fc_norm` is one of EAGLE-3.1; any other is read as
SpecForge's.

A layer id always means the output of that layer, as in `Decoder.forward(capture)` and in the key
`eagle_aux_hidden_state_layer_ids`. SafeAILab's code and SGLang read the inputs of layers 2, n/2 and n - 3 of a target
of n layers, so the defaults are 1, n/2 - 1 and n - 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from algorithms.runtime.models.config.decoder import DecoderConfig

NUM_FEATURES = 3
LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class EagleConfig:
    """Shape of an EAGLE head: `decoder` describes its layers."""

    decoder: DecoderConfig
    fc_bias: bool = True

    @property
    def draft_vocab_size(self) -> int:
        """Tokens the head predicts: all of the target's."""
        return self.decoder.vocab_size

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> EagleConfig:
        """Read a published `config.json`; ValueError names a missing or unsupported key."""
        return cls(DecoderConfig.from_hf(config), bool(config.get("bias", True)))

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` mapping with the keys of the published heads."""
        return {**self.decoder.to_hf(), "architectures": ["LlamaForCausalLMEagle"], "bias": self.fc_bias}


def default_aux_layer_ids(num_target_layers: int) -> tuple[int, ...]:
    """Layers whose output is the input of layers 2, n/2 and n - 3."""
    if num_target_layers < 5:
        raise ValueError(f"the default {LAYER_IDS_KEY} need a target of >= 5 layers, got {num_target_layers}")
    return (1, num_target_layers // 2 - 1, num_target_layers - 4)


@dataclass(frozen=True)
class Eagle3Config:
    """Shape of an EAGLE-3 head. `decoder` is its one layer; `decoder.vocab_size` is the target's vocabulary.

    `aux_layer_ids` None means the default of the target at hand.
    """

    decoder: DecoderConfig
    draft_vocab_size: int
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...] | None
    norm_output: bool = True
    fc_norm: bool = False
    """Whether each captured feature is normed in front of `fc`, as in EAGLE-3.1."""

    def __post_init__(self) -> None:
        if self.decoder.num_layers != 1:
            raise ValueError(f"an EAGLE-3 head has one layer, got {self.decoder.num_layers}")
        if not 1 <= self.draft_vocab_size <= self.decoder.vocab_size:
            raise ValueError(
                f"draft_vocab_size: expected 1 to vocab_size={self.decoder.vocab_size}, got {self.draft_vocab_size}"
            )
        if self.aux_layer_ids is not None and len(self.aux_layer_ids) != NUM_FEATURES:
            raise ValueError(f"{LAYER_IDS_KEY} must name {NUM_FEATURES} layers, got {list(self.aux_layer_ids)}")

    @property
    def reduced(self) -> bool:
        """Whether the head predicts a part of the vocabulary only."""
        return self.draft_vocab_size < self.decoder.vocab_size

    @property
    def normed_features(self) -> bool:
        """Whether the next level of a draft reads the normed stream."""
        return self.fc_norm and self.norm_output

    @property
    def normed_logits(self) -> bool:
        """Whether the LM head reads the normed stream."""
        return self.fc_norm or self.norm_output

    def layer_ids(self, num_target_layers: int) -> tuple[int, ...]:
        """The captured layers of a target of `num_target_layers`; ValueError where it has no such layers."""
        ids = self.aux_layer_ids or default_aux_layer_ids(num_target_layers)
        if any(not 0 <= index < num_target_layers for index in ids):
            raise ValueError(f"{LAYER_IDS_KEY}: expected 0 to {num_target_layers - 1}, got {list(ids)}")
        return ids

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Eagle3Config:
        """Read a `config.json` of SafeAILab's or SpecForge's; an entry of `eagle_config` wins over a top-level one.

        Some published configs repeat the target's number of layers. The head has one layer in any case.
        """
        decoder = DecoderConfig.from_hf(config)
        decoder = replace(decoder, num_layers=1, sliding_windows=decoder.sliding_windows[:1])
        merged = {**config, **(config.get("eagle_config") or {})}
        ids, fc_norm = merged.get(LAYER_IDS_KEY), bool(merged.get("fc_norm", False))
        return cls(
            decoder=decoder,
            draft_vocab_size=int(config.get("draft_vocab_size") or decoder.vocab_size),
            target_hidden_size=int(config.get("target_hidden_size") or decoder.hidden_size),
            aux_layer_ids=None if ids is None else tuple(int(index) for index in ids),
            norm_output=bool(merged.get("norm_output", not fc_norm)),
            fc_norm=fc_norm,
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` mapping with the keys of the published heads."""
        result = {
            **self.decoder.to_hf(),
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
        }
        if self.fc_norm:
            result["fc_norm"] = True
        if self.norm_output == self.fc_norm:  # an absent key means EAGLE-3 itself to every reader
            result["norm_output"] = self.norm_output
        if self.aux_layer_ids is not None:
            result["eagle_config"] = {LAYER_IDS_KEY: list(self.aux_layer_ids), "use_aux_hidden_state": True}
        return result
