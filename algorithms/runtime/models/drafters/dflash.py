"""The DFlash drafter (arXiv 2602.06036): a few decoder layers that fill a block of masks in one pass.

The drafter does not embed the committed text. It reads the target's hidden states at a few layers, concatenated along
the width: context = hidden_norm(fc(features)). Of the target's last layer it reads what stands behind the final norm,
as the code of z-lab does (transformers' `hidden_states` end with it). Each draft layer projects the same context with
its own key and value matrices, so one matmul gives the keys and values of all layers. The tokens of the block then
attend to [context; block]. Embedding and LM head are the target's. Parameter names are those of the published
checkpoints.

With a Markov head (DSpark, github.com/deepseek-ai/DeepSpec) the logits of the k-th draft are those of the block plus
w2 w1[t], a matrix of low rank read at the token t before it. The block fills all positions at once and cannot know
which token the position before took; this head tells it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from algorithms.runtime.models.config.dflash import DFlashConfig
from algorithms.runtime.models.decoder import (
    INIT_STD,
    Decoder,
    DecoderLayer,
    Mixer,
    RMSNorm,
    embedding,
    reset_layers,
    run_layers,
)
from algorithms.runtime.models.fusion import FusableModel, project, queries_only
from specdec_kernels import linear


class StackedKV(NamedTuple):
    """Key and value weights of all draft layers side by side, so that one matmul serves them all."""

    weight: Tensor
    """[num_layers * 2 * H_kv * D, hidden], keys then values of each layer."""
    bias: Tensor | None
    k_norm: Tensor | None
    """[num_layers, D]."""


class MarkovHead(nn.Module):
    """What the token before adds to a draft's logits: w2 w1[token], of rank `rank`."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def forward(self, before: Tensor) -> Tensor:
        """`before [...]` int64 to [..., V]."""
        return self.markov_w2(self.markov_w1(before))

    def reset_parameters(self) -> None:
        """Training starts from the block alone."""
        nn.init.normal_(self.markov_w1.weight, std=INIT_STD)
        nn.init.zeros_(self.markov_w2.weight)


class DFlashDrafter(FusableModel):
    """Draft layers over materialised target features."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.decoder.hidden_size, config.decoder.rms_norm_eps
        self.layers = nn.ModuleList(DecoderLayer(config.decoder) for _ in range(config.decoder.num_layers))
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.norm = RMSNorm(hidden, eps)
        self.mask_embedding = nn.Parameter(torch.zeros(hidden)) if config.owns_mask else None
        rank, vocab_size = config.markov_rank, config.decoder.vocab_size
        self.markov_head = MarkovHead(vocab_size, rank) if rank else None

    def reset_parameters(self) -> None:
        """Initialise for training from scratch with torch's global generator."""
        reset_layers(self.layers)
        nn.init.normal_(self.fc.weight, std=self.fc.in_features**-0.5)
        if self.mask_embedding is not None:
            nn.init.normal_(self.mask_embedding, std=INIT_STD)
        if self.markov_head is not None:
            self.markov_head.reset_parameters()

    def embed_block(self, target: Decoder, last_tokens: Tensor, size: int) -> Tensor:
        """The input of blocks of `size` tokens behind `last_tokens [...]` int64: each token's embedding in `target`,
        then masks; `[..., size, hidden]`."""
        if self.mask_embedding is None:
            tokens = last_tokens.new_full((*last_tokens.shape, size), self.config.mask_token_id)
            tokens[..., 0] = last_tokens
            return target.embed(tokens)
        first = target.embed(last_tokens)[..., None, :]
        masks = self.mask_embedding.to(first.dtype).expand(*last_tokens.shape, size - 1, -1)
        return torch.cat([first, masks], dim=-2)

    def context(self, features: list[Tensor], hidden: Tensor) -> Tensor:
        """What the target computed to context `[..., T, hidden]`: `features`, one `[..., T, hidden]` per target layer
        id, and its final hidden states, behind the norm."""
        expected, last = len(self.config.target_layer_ids), self.config.num_target_layers - 1
        if len(features) != expected:
            raise ValueError(f"DFlash reads {expected} target layers, got features of {len(features)}")
        ids = self.config.target_layer_ids
        features = [hidden if index == last else feature for index, feature in zip(ids, features, strict=True)]
        return self.hidden_norm(project(self.fc, torch.cat(features, dim=-1), self.impl))

    def stack_kv(self) -> StackedKV:
        """Stack the weights that `context_kv` multiplies with; for inference, once after loading."""
        attentions = [cast(DecoderLayer, layer).self_attn for layer in self.layers]
        weights: list[Tensor] = [w for a in attentions for w in (a.k_proj.weight, a.v_proj.weight)]
        biases: list[Tensor] = [b for a in attentions for b in (a.k_proj.bias, a.v_proj.bias) if b is not None]
        norms: list[Tensor] = [a.k_norm.weight for a in attentions if a.k_norm is not None]
        return StackedKV(
            torch.cat(weights), torch.cat(biases) if biases else None, torch.stack(norms) if norms else None
        )

    def context_kv(self, context: Tensor, stacked: StackedKV | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of every draft layer from `context [..., T, hidden]`, before key norm and RoPE.

        Returns two tensors `[..., T, num_layers, H_kv, D]`; one matmul over the stacked weights of all layers.
        """
        decoder = self.config.decoder
        weight, bias, _ = stacked or self.stack_kv()
        if self.impl is None:
            flat = F.linear(context, weight, bias)
        else:
            flat = linear(context.contiguous(), weight, bias, impl=self.impl)
        sizes = {"l": decoder.num_layers, "two": 2, "d": decoder.head_dim}
        keys, values = rearrange(flat, "... (l two h d) -> two ... l h d", **sizes)
        return keys, values

    def forward(self, hidden: Tensor, mixer: Mixer) -> Tensor:
        """Block embeddings `[..., T, hidden]` through the draft layers and the final norm; same shape."""
        return run_layers(cast(Sequence[DecoderLayer], self.layers), self.norm, hidden, mixer)[0]

    def cap(self, logits: Tensor) -> Tensor:
        """The logits of drafts from those of the target's LM head: cap * tanh(logits / cap), where there is a cap."""
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def rehearse(self, rows: int) -> None:
        hidden = self.norm.weight.new_zeros(1, rows, self.config.decoder.hidden_size)
        self.context_kv(self.context([hidden] * len(self.config.target_layer_ids), hidden))
        self(hidden, queries_only)
