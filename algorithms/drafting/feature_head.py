"""Models of drafters that read the target's hidden states, and heads that continue these, token after token.

Slot p of a head pairs the feature f_p of position p with the token of p + 1: forward(x_{p+1}, f_p) -> h_{p+1}, from
which the logits of x_{p+2} follow. f_p is the target's where it has computed p, else the head's own output. Rotary
positions are p.
"""

from typing import Any

import torch
from torch import Tensor, nn

from algorithms.drafting.tree_drafter import in_target
from algorithms.models.config import EMBEDDING_LAYER, DecoderConfig
from algorithms.models.decoder import Decoder, embedding
from algorithms.models.dense_mixer import DenseMixer
from algorithms.models.fusion import FusableModel, project, queries_only
from algorithms.models.layers import Mixer


def at_sources(feature: Tensor, sources: Tensor | None) -> Tensor:
    """`feature [B, S, hidden]` of the columns `sources [B, T]` int64; None: as it is."""
    if sources is None:
        return feature
    return feature.gather(1, sources[..., None].expand(-1, -1, feature.shape[-1]))


class DrafterModel(FusableModel):
    """Uses the target's embedding and LM head where it has none of its own. The target is no submodule."""

    config: Any
    layer_ids: tuple[int, ...] = ()
    """Target layers whose output it reads, `EMBEDDING_LAYER` for that of the embedding."""
    d2t: Tensor | None
    t2d: Tensor | None

    def __init__(
        self, decoder: DecoderConfig, own_embedding: bool, own_head: bool = False, num_known: int | None = None
    ) -> None:
        """`decoder` describes the layers, as `config.decoder` does. `num_known` of the target's tokens are drafted, all
        if None. Of `draft_vocab_size` tokens, `d2t[i] + i` is the target's id of token i, and `t2d` marks these ids."""
        super().__init__()
        vocab_size, hidden = decoder.vocab_size, decoder.hidden_size
        self.draft_vocab_size = num_known or vocab_size
        self.embed_tokens = embedding(vocab_size, hidden) if own_embedding else None
        self.lm_head = nn.Linear(hidden, self.draft_vocab_size, bias=False) if own_head else None
        is_reduced = self.draft_vocab_size < vocab_size
        self.register_buffer("d2t", torch.zeros(self.draft_vocab_size, dtype=torch.int64) if is_reduced else None)
        self.register_buffer("t2d", torch.zeros(vocab_size, dtype=torch.bool) if is_reduced else None)
        self._bound: tuple[Decoder, ...] = ()

    def bind(self, target: Decoder) -> None:
        """Use the embedding and the LM head of `target`; needed before the first forward."""
        self._bound = (target,)

    @property
    def target(self) -> Decoder:
        if not self._bound:
            raise ValueError("the head is not bound to a target: call bind(target) first")
        return self._bound[0]

    @property
    def target_layers(self) -> tuple[int, ...]:
        return tuple(index for index in self.layer_ids if index != EMBEDDING_LAYER)

    @property
    def vocabulary(self) -> Tensor | None:
        """[draft_vocab_size] int64: added to a draft id to give the target's; None adds nothing."""
        return self.d2t

    @property
    def table(self) -> Tensor:
        """[V, hidden]: embeddings of the target's ids."""
        return (self.embed_tokens or self.target.model.embed_tokens).weight

    def embed(self, tokens: Tensor) -> Tensor:
        """`tokens [..., T]` int64, ids of the target, to `[..., T, hidden]`."""
        return self.target.embed(tokens) if self.embed_tokens is None else self.embed_tokens(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[..., draft_vocab_size]` of `hidden [..., hidden]`."""
        return self.target.logits(hidden) if self.lm_head is None else project(self.lm_head, hidden, self.impl)

    def gather(self, features: list[Tensor], tokens: Tensor) -> list[Tensor]:
        """What is read of `layer_ids`, from the outputs of `target_layers` and the tokens of their positions."""
        given = iter(features)
        return [self.target.embed(tokens) if index == EMBEDDING_LAYER else next(given) for index in self.layer_ids]


class FeatureHead(DrafterModel):
    @property
    def decoder(self) -> DecoderConfig:
        return self.config.decoder

    def fuse(self, features: list[Tensor], hidden: Tensor) -> Tensor:
        """Features `[..., T, hidden]`, as `forward` takes them, from `gather` and the target's final hidden states; by
        default these."""
        return hidden

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
        return self.head(hidden)

    def to_target(self, ids: Tensor) -> Tensor:
        return in_target(ids, self.vocabulary)

    def warmup(self, rows: int) -> None:
        weight = self.target.model.embed_tokens.weight
        hidden = weight.new_zeros(1, rows, self.target.config.hidden_size)
        tokens = torch.zeros(1, rows, dtype=torch.int64, device=weight.device)
        feature = self.fuse(self.gather([hidden] * len(self.target_layers), tokens), hidden)
        # Only attention may come out as its queries.
        mixer = DenseMixer(self.decoder, rows, weight.device) if self.decoder.mixings else queries_only
        self.logits(self(tokens, feature, mixer))
