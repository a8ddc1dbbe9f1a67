"""EAGLE and EAGLE-3 heads: decoder layers that continue the target's hidden states, as `FeatureHead` explains.

EAGLE (arXiv 2401.15077): f_p is the target's final-normed hidden state. x = fc([embed(x_{p+1}); f_p]) runs through
decoder layers, the first without an input norm, and the target's LM head reads the result.

EAGLE-3 (arXiv 2503.01840): f_p = fc([low; middle; high]) fuses a few target layers. Queries, keys and values of the
first layer are projected from [input_layernorm(embed); hidden_norm(f)], the residual stream is f. Logits come from its
own norm and LM head over the most frequent tokens; `d2t[i] + i` is the target's id of draft token i, and `t2d` marks
those ids. The stream before the norm is fed back. `Eagle3Config` names where published heads differ.

P-EAGLE (arXiv 2602.01469) drafts K tokens in one pass: after slot p, whose logits are the first draft's, K - 1 rows at
slots p + 1, p + 2, ... pair a mask token with fc(mask_hidden), and row d has the logits of x_{p+2+d}. Their keys are
not kept.

Parameter names are as in the published checkpoints.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import specdec_kernels as kernels
from algorithms.drafting.feature_head import FeatureHead, at_sources
from algorithms.drafting.level_drafter import NORMED
from algorithms.eagle.config import EACH, JOINT, Eagle3Config, EagleConfig
from algorithms.models.config import DecoderConfig
from algorithms.models.decoder import Block, DecoderLayer, reset_layers, run_fused
from algorithms.models.fusion import project
from algorithms.models.layers import Attention, Mixer, RMSNorm, SwiGLU
from specdec_kernels import Normed


class EagleDrafter(FeatureHead):
    config: EagleConfig

    def __init__(self, config: EagleConfig, own_embedding: bool = False) -> None:
        super().__init__(config.decoder, own_embedding)
        self.config = config
        hidden = config.decoder.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            DecoderLayer(config.decoder, index > 0) for index in range(config.decoder.num_layers)
        )

    def reset_parameters(self) -> None:
        reset_layers(self.layers)
        nn.init.normal_(self.fc.weight, std=self.fc.in_features**-0.5)
        if self.fc.bias is not None:
            nn.init.zeros_(self.fc.bias)

    def forward(self, tokens: Tensor, feature: Tensor, mixer: Mixer, level: int = 0) -> Tensor:
        x = project(self.fc, torch.cat([self.embed(tokens).to(feature.dtype), feature], dim=-1), self.impl)
        for index, layer in enumerate(self.layers):
            x = layer(index, x, mixer)
        return x


class Eagle3Layer(Block):
    """A decoder layer whose attention reads the normed token embedding and the normed stream."""

    input_layernorm: RMSNorm

    def __init__(self, config: DecoderConfig, normed_residual: bool = False) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self._normed_residual = normed_residual
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.self_attn = Attention(config, in_features=2 * hidden)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = SwiGLU(config)

    def start(self, tokens: Tensor, table: Tensor, feature: Tensor, sources: Tensor | None) -> Normed:
        """What attention reads, and the start of the residual stream; by kernels where the norms run as such."""
        if self.hidden_norm.impl is None:
            feature = at_sources(feature, sources)
            embedded = F.embedding(tokens, table).to(feature.dtype)
            normed = torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], dim=-1)
        else:
            weights = self.input_layernorm.weight, self.hidden_norm.weight
            normed, feature = kernels.embed_join_rms_norm(
                tokens.contiguous(), table, weights[0], feature.contiguous(), weights[1], self.hidden_norm.eps, sources,
                impl=self.hidden_norm.impl,
            )  # fmt: skip
        return Normed(normed, normed[..., feature.shape[-1] :].contiguous() if self._normed_residual else feature)

    def forward(self, start: Normed, mixer: Mixer) -> Tensor:
        return self.after_mixing(self.self_attn(0, start.normed, mixer), start.residual)


class Eagle3Drafter(FeatureHead):
    """The head of EAGLE-3; `own_head` False uses the target's LM head, which needs the whole vocabulary."""

    config: Eagle3Config

    def __init__(
        self,
        config: Eagle3Config,
        num_target_layers: int,
        own_embedding: bool = False,
        own_head: bool = True,
        mask_shape: Sequence[int] | None = None,
    ) -> None:
        """`mask_shape`: of P-EAGLE's `mask_hidden`, which has one entry per feature value; None: there is none."""
        super().__init__(config.decoder, own_embedding, own_head, config.draft_vocab_size)
        self.config, self.layer_ids = config, config.layer_ids(num_target_layers)
        decoder, width, eps = config.decoder, config.target_hidden_size, config.decoder.rms_norm_eps
        each = config.num_features if config.feature_norm == EACH else 0
        self.fc_norm = nn.ModuleList(RMSNorm(width, eps) for _ in range(each))
        self.input_norm = RMSNorm(config.num_features * width, eps) if config.feature_norm == JOINT else None
        self.fc = nn.Linear(config.num_features * width, decoder.hidden_size, bias=False)
        self.mask_hidden = None if mask_shape is None else nn.Parameter(torch.zeros(*mask_shape))
        self.midlayer = Eagle3Layer(decoder, config.residual == NORMED)
        self.layers = nn.ModuleDict({str(index): DecoderLayer(decoder) for index in range(1, decoder.num_layers)})
        self.norm = RMSNorm(decoder.hidden_size, eps)

    def reset_parameters(self) -> None:
        """Initialise for training from scratch; the LM head and the norm that it reads start as the bound target's."""
        reset_layers(nn.ModuleList([self.midlayer, *self.layers.values()]))
        nn.init.normal_(self.fc.weight, std=self.fc.in_features**-0.5)
        if self.lm_head is not None:
            head = self.target.lm_head or self.target.model.embed_tokens
            ids = torch.arange(self.draft_vocab_size, device=self.lm_head.weight.device)
            with torch.no_grad():
                self.lm_head.weight.copy_(head.weight[self.to_target(ids)])
                self.norm.weight.copy_(self.target.model.norm.weight)

    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Let the draft vocabulary be `target_ids [draft_vocab_size]` int64, rising."""
        assert self.d2t is not None and self.t2d is not None
        self.d2t.copy_(target_ids - torch.arange(len(target_ids), device=target_ids.device))
        self.t2d.zero_()
        self.t2d[target_ids] = True

    def fuse(self, features: list[Tensor], hidden: Tensor) -> Tensor:
        """`features`, one `[..., T, target_hidden]` per layer id, to `[..., T, hidden]`."""
        if len(features) != self.config.num_features:
            raise ValueError(
                f"this head reads {self.config.num_features} target layers, got features of {len(features)}"
            )
        if self.config.feature_norm == EACH:
            features = [norm(feature) for norm, feature in zip(self.fc_norm, features, strict=True)]
        joint = torch.cat(features, dim=-1)
        return project(self.fc, joint if self.input_norm is None else self.input_norm(joint), self.impl)

    def mask_feature(self) -> Tensor:
        """[hidden]: the fused feature of P-EAGLE's mask rows; zeros stand for a `mask_hidden` that is absent."""
        size = self.config.num_features * self.config.target_hidden_size
        values = self.norm.weight.new_zeros(size) if self.mask_hidden is None else self.mask_hidden.flatten()
        features = list(values[None].chunk(self.config.num_features, dim=-1))
        return self.fuse(features, features[0])[0]

    def _run(self, tokens: Tensor, feature: Tensor, mixer: Mixer, sources: Tensor | None = None) -> Normed:
        """The residual stream after the layers, and its norm."""
        start, others = self.midlayer.start(tokens, self.table, feature, sources), list(self.layers.values())
        if self.impl is not None:
            layers = cast(Sequence[Block], [self.midlayer, *others])
            normed, (stream,) = run_fused(layers, self.norm, start, mixer, [len(others)])
            return Normed(normed, stream)
        stream = self.midlayer(start, mixer)
        for index, layer in enumerate(others, 1):
            stream = layer(index, stream, mixer)
        return Normed(self.norm(stream), stream)

    def forward(self, tokens: Tensor, feature: Tensor, mixer: Mixer, level: int = 0) -> Tensor:
        return self._fed_back(self._run(tokens, feature, mixer))

    def advance(
        self, tokens: Tensor, feature: Tensor, mixer: Mixer, level: int, sources: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ended = self._run(tokens, feature, mixer, sources)
        is_normed = NORMED in (self.config.logits, self.config.feedback)
        return self._fed_back(ended), self.head(ended.normed if is_normed else ended.residual)

    def _fed_back(self, ended: Normed) -> Tensor:
        return ended.normed if self.config.feedback == NORMED else ended.residual

    def logits(self, hidden: Tensor) -> Tensor:
        is_raw = self.config.logits == NORMED and self.config.feedback != NORMED
        return self.head(self.norm(hidden) if is_raw else hidden)
