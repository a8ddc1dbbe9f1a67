"""Heads that continue the target's hidden states, one token after another.

Slot p of a head pairs the feature f_p of position p with the token of p + 1: forward(x_{p+1}, f_p) -> h_{p+1}, from
which the logits of x_{p+2} follow. f_p is the target's where it has computed p, else the head's own output. Rotary
positions are p.
"""

from typing import Any

import torch
from torch import Tensor, nn

from algorithms.drafting.tree_drafter import in_target
from algorithms.models.config import DecoderConfig
from algorithms.models.decoder import Decoder, embedding
from algorithms.models.dense_mixer import DenseMixer
from algorithms.models.fusion import FusableModel, queries_only
from algorithms.models.layers import Mixer


def at_sources(feature: Tensor, sources: Tensor | None) -> Tensor:
    """`feature [B, S, hidden]` of the columns `sources [B, T]` int64; None: as it is."""
    if sources is None:
        return feature
    return feature.gather(1, sources[..., None].expand(-1, -1, feature.shape[-1]))


class FeatureHead(FusableModel):
    """Uses the target's embedding and LM head where it has none of its own. The target is no submodule."""

    config: Any
    embed_tokens: nn.Embedding | None
    target_layers: tuple[int, ...] = ()

    def __init__(self, decoder: DecoderConfig, own_embedding: bool) -> None:
        """`decoder` describes the head's layers, as `config.decoder` does."""
        super().__init__()
        self.embed_tokens = embedding(decoder.vocab_size, decoder.hidden_size) if own_embedding else None
        self._bound: tuple[Decoder, ...] = ()

    @property
    def decoder(self) -> DecoderConfig:
        return self.config.decoder

    def bind(self, target: Decoder) -> None:
        """Use the embedding and the LM head of `target`; needed before the first forward."""
        self._bound = (target,)

    @property
    def target(self) -> Decoder:
        if not self._bound:
            raise ValueError("the head is not bound to a target: call bind(target) first")
        return self._bound[0]

    def embed(self, tokens: Tensor) -> Tensor:
        """`tokens [..., T]` int64, ids of the target, to `[..., T, hidden]`."""
        return self.target.embed(tokens) if self.embed_tokens is None else self.embed_tokens(tokens)

    def gather(self, features: list[Tensor], tokens: Tensor) -> list[Tensor]:
        """The input of `fuse`, from the outputs of `target_layers` and the tokens of their positions."""
        return features

    def fuse(self, features: list[Tensor], hidden: Tensor) -> Tensor:
        """Features `[..., T, hidden]`, as `forward` takes them, from `gather` and the target's final hidden states."""
        raise NotImplementedError

    def forward(self, tokens: Tensor, feature: Tensor, mixer: Mixer, level: int = 0) -> Tensor:
        """`tokens [..., T]` int64 of positions p + 1, `feature [..., T, hidden]` of p, to the features of p + 1. At
        `level` 0 the features are the target's, at level i those of level i - 1."""
        raise NotImplementedError

    def advance(
        self, tokens: Tensor, feature: Tensor, mixer: Mixer, level: int, sources: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`forward` and its logits; `sources` as in `at_sources`."""
        hidden = self(tokens, at_sources(feature, sources), mixer, level)
        return hidden, self.logits(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """`hidden [..., hidden]`, as `forward` returns it, to `[..., draft_vocab_size]`."""
        raise NotImplementedError

    @property
    def vocabulary(self) -> Tensor | None:
        """[draft_vocab_size] int64: added to a draft id to give the target's; None adds nothing."""
        return None

    def to_target(self, ids: Tensor) -> Tensor:
        return in_target(ids, self.vocabulary)

    @property
    def draft_vocab_size(self) -> int:
        return self.decoder.vocab_size

    def warmup(self, rows: int) -> None:
        weight = self.target.model.embed_tokens.weight
        hidden = weight.new_zeros(1, rows, self.target.config.hidden_size)
        tokens = torch.zeros(1, rows, dtype=torch.int64, device=weight.device)
        feature = self.fuse(self.gather([hidden] * len(self.target_layers), tokens), hidden)
        # Only attention may come out as its queries.
        mixer = DenseMixer(self.decoder, rows, weight.device) if self.decoder.mixings else queries_only
        self.logits(self(tokens, feature, mixer))
