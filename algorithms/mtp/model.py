"""MTP heads: one decoder layer after a projection of a token's embedding and the target's hidden state.

    x = input_proj [token_layernorm(embed(x_{p+1})) ; hidden_layernorm(f_p)]    (halves in the family's order)
    h_{p+1} = final_layernorm(layer(x)),    logits of x_{p+2} = target's LM head of h_{p+1}

Level i of a draft runs layer i mod n of n. Every layer stores every row, with the feature that its level reads.
Parameter names are those of MiMo and speculators; `config` turns others into these. Origin: DeepSeek-V3 (arXiv
2412.19437).
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from algorithms.drafting.feature_head import FeatureHead
from algorithms.drafting.level_drafter import NORMED, RAW
from algorithms.models.config import DecoderConfig
from algorithms.models.decoder import DecoderLayer, reset_layers
from algorithms.models.fusion import project
from algorithms.models.layers import Mixer, RMSNorm
from algorithms.mtp.config import HIDDEN, MTPConfig


class MTPLayer(DecoderLayer):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = RMSNorm(hidden, eps)
        self.hidden_layernorm = RMSNorm(hidden, eps)
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.final_layernorm = RMSNorm(hidden, eps)

    def joined(self, embedded: Tensor, feature: Tensor, hidden_first: bool) -> Tensor:
        """Input of the decoder layer, `[..., hidden]`."""
        halves = [self.token_layernorm(embedded), self.hidden_layernorm(feature)]
        both = torch.cat(halves[::-1] if hidden_first else halves, dim=-1)
        return project(self.input_proj, both, self.token_layernorm.impl)


class MTPHead(FeatureHead):
    def __init__(
        self, config: MTPConfig, num_target_layers: int, own_embedding: bool = False, own_head: bool = False
    ) -> None:
        super().__init__(config.decoder, own_embedding, own_head)
        self.config = config
        self.layer_ids = (num_target_layers - 1,) if config.hidden_in == RAW else ()
        self.mtp_layers = nn.ModuleList(MTPLayer(config.decoder) for _ in range(config.decoder.num_layers))

    def reset_parameters(self) -> None:
        """Training start. The norms around each layer are the target's final one, so that with raw features the layer
        reads what the target's LM head reads, and the head's states are of that kind."""
        reset_layers(self.mtp_layers)
        for layer in self._layers:
            for norm in (layer.hidden_layernorm, layer.final_layernorm):
                norm.load_state_dict(self.target.model.norm.state_dict())

    def fuse(self, features: list[Tensor], hidden: Tensor) -> Tensor:
        return features[0] if self.config.hidden_in == RAW else hidden

    def forward(self, tokens: Tensor, feature: Tensor, mixer: Mixer, level: int = 0) -> Tensor:
        embedded, layers = self.embed(tokens).to(feature.dtype), self._layers
        streams = [
            layer(index, layer.joined(embedded, feature, self.config.first == HIDDEN), mixer)
            for index, layer in enumerate(layers)
        ]
        stream, layer = streams[level % len(layers)], layers[level % len(layers)]
        return layer.final_layernorm(stream) if self.config.feedback == NORMED else stream

    @property
    def _layers(self) -> Sequence[MTPLayer]:
        return cast(Sequence[MTPLayer], self.mtp_layers)

    def logits(self, hidden: Tensor) -> Tensor:
        if self.config.feedback == RAW:
            hidden = self._layers[0].final_layernorm(hidden)
        return self.head(hidden)
