"""EAGLE and EAGLE-3 heads: decoder layers that continue the target's hidden states.

Slot p of a head pairs the feature of position p with the token of position p + 1. Its output stands for the next
feature: forward(x_{p+1}, f_p) -> h_{p+1}, from which the logits of x_{p+2} follow. For positions that the target has
computed, f_p is the target's; behind them the head's own output is fed back. Rotary positions are p.

EAGLE (arXiv 2401.15077): f_p is the target's final-normed hidden state. x = fc([embed(x_{p+1}); f_p]) runs through
decoder layers, the first without an input norm, and the target's LM head reads the result.

EAGLE-3 (arXiv 2503.01840): f_p = fc([low; middle; high]) fuses three layers of the target. In its layer, queries, keys
and values are projected from [input_layernorm(embed); hidden_norm(f)], the residual stream is f. Logits come from its
own norm and LM head over the most frequent tokens; `d2t[i] + i` is the target's id of draft token i, and `t2d` marks
the target ids that have a draft token. The stream before the norm is fed back.

Parameter names are those of the published checkpoints. Both classes have one interface, so one algorithm serves both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from algorithms.runtime.models.config.decoder import DecoderConfig
from algorithms.runtime.models.config.eagle import NUM_FEATURES, Eagle3Config, EagleConfig
from algorithms.runtime.models.decoder import (
    Attention,
    Block,
    Decoder,
    DecoderLayer,
    Mixer,
    RMSNorm,
    SwiGLU,
    embedding,
    reset_layers,
)
from algorithms.runtime.models.fusion import FusableModel, project, queries_only


class SharedTarget(FusableModel):
    """A head that uses the target's embedding and LM head where it has none of its own.

    The target is not a submodule: it is not saved, trained or moved with the head.
    """

    embed_tokens: nn.Embedding | None
    capture: tuple[int, ...] = ()
    """Target layers whose features `fuse` reads."""

    def __init__(self, config: DecoderConfig, own_embedding: bool) -> None:
        super().__init__()
        self.embed_tokens = embedding(config.vocab_size, config.hidden_size) if own_embedding else None
        self._bound: tuple[Decoder, ...] = ()

    def bind(self, target: Decoder) -> None:
        """Use the embedding and the LM head of `target`; needed before the first forward."""
        self._bound = (target,)

    @property
    def target(self) -> Decoder:
        """The target that was bound."""
        if not self._bound:
            raise ValueError("the head is not bound to a target: call bind(target) first")
        return self._bound[0]

    def embed(self, tokens: Tensor) -> Tensor:
        """`tokens [..., T]` int64, ids of the target, to `[..., T, hidden]`."""
        return self.target.embed(tokens) if self.embed_tokens is None else self.embed_tokens(tokens)

    def fuse(self, features: list[Tensor], hidden: Tensor) -> Tensor:
        """What `forward` takes as the feature of positions that the target has computed, `[..., T, hidden]`, from its
        captured layers and its final hidden states."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """`hidden [..., hidden]`, as `forward` returns it, to `[..., draft_vocab_size]`."""
        raise NotImplementedError

    @property
    def vocabulary(self) -> Tensor | None:
        """[draft_vocab_size] int64: what is added to a draft id, an index into `logits`, to give the target's; None
        adds nothing."""
        return None

    def to_target(self, ids: Tensor) -> Tensor:
        """Draft ids to the target's ids."""
        return ids if self.vocabulary is None else ids + self.vocabulary[ids]

    def rehearse(self, rows: int) -> None:
        weight = next(self.parameters())
        hidden = weight.new_zeros(1, rows, self.target.config.hidden_size)
        tokens = torch.zeros(1, rows, dtype=torch.int64, device=weight.device)
        feature = self.fuse([hidden] * len(self.capture), hidden)
        self.logits(self(tokens, feature, queries_only))


class EagleDrafter(SharedTarget):
    """The head of EAGLE-1 and EAGLE-2."""

    def __init__(self, config: EagleConfig, own_embedding: bool = False) -> None:
        super().__init__(config.decoder, own_embedding)
        self.config = config
        hidden = config.decoder.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            DecoderLayer(config.decoder, index > 0) for index in range(config.decoder.num_layers)
        )

    @property
    def draft_vocab_size(self) -> int:
        """Width of `logits`."""
        return self.config.decoder.vocab_size

    def reset_parameters(self) -> None:
        """Initialise for training from scratch with torch's global generator."""
        reset_layers(self.layers)
        nn.init.normal_(self.fc.weight, std=self.fc.in_features**-0.5)
        if self.fc.bias is not None:
            nn.init.zeros_(self.fc.bias)

    def fuse(self, features: list[Tensor], hidden: Tensor) -> Tensor:
        """The final hidden states themselves."""
        return hidden

    def forward(self, tokens: Tensor, feature: Tensor, mixer: Mixer) -> Tensor:
        """`tokens [..., T]` int64 of positions p + 1, `feature [..., T, hidden]` of p, to the features of p + 1."""
        x = project(self.fc, torch.cat([self.embed(tokens).to(feature.dtype), feature], dim=-1), self.impl)
        for index, layer in enumerate(self.layers):
            x = layer(index, x, mixer)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """`hidden [..., hidden]`, as `forward` returns it, to `[..., draft_vocab_size]`."""
        return self.target.logits(hidden)


class Eagle3Layer(Block):
    """A decoder layer whose attention reads the normed token embedding beside the normed stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.self_attn = Attention(config, in_features=2 * hidden)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = SwiGLU(config)

    def forward(self, embedding: Tensor, feature: Tensor, mixer: Mixer) -> Tensor:
        both = torch.cat([self.input_layernorm(embedding), self.hidden_norm(feature)], dim=-1)
        return self.behind_attention(self.self_attn(0, both, mixer), feature)


class Eagle3Drafter(SharedTarget):
    """The head of EAGLE-3; `own_head` False uses the target's LM head, which needs the whole vocabulary."""

    d2t: Tensor
    t2d: Tensor

    def __init__(
        self, config: Eagle3Config, num_target_layers: int, own_embedding: bool = False, own_head: bool = True
    ) -> None:
        super().__init__(config.decoder, own_embedding)
        self.config = config
        self.capture = config.layer_ids(num_target_layers)
        decoder = config.decoder
        norms = (RMSNorm(config.target_hidden_size, decoder.rms_norm_eps) for _ in range(NUM_FEATURES * config.fc_norm))
        self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(NUM_FEATURES * config.target_hidden_size, decoder.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(decoder)
        self.norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.lm_head = nn.Linear(decoder.hidden_size, config.draft_vocab_size, bias=False) if own_head else None
        if config.reduced:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(decoder.vocab_size, dtype=torch.bool))

    @property
    def draft_vocab_size(self) -> int:
        """Width of `logits`."""
        return self.config.draft_vocab_size

    def reset_parameters(self) -> None:
        """Initialise for training from scratch; the LM head and the norm that it reads start as the bound target's."""
        reset_layers(nn.ModuleList([self.midlayer]))
        nn.init.normal_(self.fc.weight, std=self.fc.in_features**-0.5)
        if self.lm_head is not None:
            head = self.target.lm_head or self.target.model.embed_tokens
            ids = torch.arange(self.draft_vocab_size, device=self.lm_head.weight.device)
            with torch.no_grad():
                self.lm_head.weight.copy_(head.weight[self.to_target(ids)])
                self.norm.weight.copy_(self.target.model.norm.weight)

    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Let the draft vocabulary be `target_ids [draft_vocab_size]` int64, rising."""
        self.d2t.copy_(target_ids - torch.arange(len(target_ids), device=target_ids.device))
        self.t2d.zero_()
        self.t2d[target_ids] = True

    def fuse(self, features: list[Tensor], hidden: Tensor) -> Tensor:
        """`features`, one `[..., T, target_hidden]` per captured layer, to `[..., T, hidden]`."""
        if len(features) != NUM_FEATURES:
            raise ValueError(f"EAGLE-3 reads {NUM_FEATURES} target layers, got features of {len(features)}")
        if self.config.fc_norm:
            features = [norm(feature) for norm, feature in zip(self.fc_norm, features, strict=True)]
        return project(self.fc, torch.cat(features, dim=-1), self.impl)

    def forward(self, tokens: Tensor, feature: Tensor, mixer: Mixer) -> Tensor:
        """`tokens [..., T]` int64 of positions p + 1, `feature [..., T, hidden]` of p, to the features of p + 1."""
        stream = self.midlayer(self.embed(tokens).to(feature.dtype), feature, mixer)
        return self.norm(stream) if self.config.normed_features else stream

    def logits(self, hidden: Tensor) -> Tensor:
        """`hidden [..., hidden]`, as `forward` returns it, to `[..., draft_vocab_size]`."""
        is_raw = self.config.normed_logits and not self.config.normed_features
        normed = self.norm(hidden) if is_raw else hidden
        return self.target.logits(normed) if self.lm_head is None else project(self.lm_head, normed, self.impl)

    @property
    def vocabulary(self) -> Tensor | None:
        return self.d2t if self.config.reduced else None
