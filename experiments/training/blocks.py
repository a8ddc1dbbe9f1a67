"""Block drafting on dense rows: the training objective of DFlash and the simulation of its acceptance.

For a sequence x and an anchor position a the drafter sees the target's features of positions < a and a block of B
tokens at positions a … a+B-1: the anchor x_a, then masks. Row k of the block predicts x_{a+k}. This is the situation of
decoding exactly: the anchor is the bonus token, verified but not yet in the cache, so it has no features.
Loss (arXiv 2602.06036): sum_k w_k CE_k / sum_k w_k with w_k = exp(-(k-1)/gamma), k = 1 … B-1, where the label exists.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.runtime.models.config import DFlashConfig
from algorithms.runtime.models.decoder import Decoder, MixerWeights
from algorithms.runtime.models.dense_mixer import DenseMixer, head_norm
from algorithms.runtime.models.drafters.dflash import DFlashDrafter
from algorithms.runtime.models.rope import apply_rope, rope_table
from experiments.training.acceptance import leading_hits
from experiments.training.batches import TrainingBatch
from experiments.training.drafting import DrafterObjective, DrafterRunConfig
from experiments.training.responses import ResponseSource

IGNORED = -100


class BlockMixer:
    """Attention of block tokens over [context; own block].

    `keys`, `values` `[B, T, layers, H_kv, D]` come from `DFlashDrafter.context_kv`; `anchors [B, A]` are the positions
    of the blocks. Block tokens are laid out `[B, A * block_size]`.
    """

    def __init__(self, config: DFlashConfig, keys: Tensor, values: Tensor, anchors: Tensor, table: Tensor) -> None:
        if config.decoder.sliding_windows:
            raise ValueError("training supports draft layers with full attention, got sliding windows")
        self.eps = config.decoder.rms_norm_eps
        self.keys, self.values, self.table = keys, values, table
        size, device = config.block_size, keys.device
        self.positions = (anchors[:, :, None] + torch.arange(size, device=device)).flatten(1)
        self.context_positions = torch.arange(keys.shape[1], device=device)
        before = self.context_positions < anchors[:, :, None]
        same = torch.eye(anchors.shape[1], dtype=torch.bool, device=device).expand(anchors.shape[0], -1, -1)
        mask = torch.cat([before, same.repeat_interleave(size, dim=2)], dim=2)
        self.mask = mask.repeat_interleave(size, dim=1)[:, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, weights: MixerWeights) -> Tensor:
        q = apply_rope(head_norm(q, weights.q_norm, self.eps), self.table, self.positions)
        block = apply_rope(head_norm(k, weights.k_norm, self.eps), self.table, self.positions)
        context = head_norm(self.keys[:, :, layer], weights.k_norm, self.eps)
        context = apply_rope(context, self.table, self.context_positions)
        keys = torch.cat([context, block], dim=1).transpose(1, 2)
        values = torch.cat([self.values[:, :, layer].to(v.dtype), v], dim=1).transpose(1, 2)
        group = q.shape[2] // k.shape[2]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, self.mask).transpose(1, 2)


def draw_anchors(batch: TrainingBatch, count: int, rng: np.random.Generator) -> Tensor:
    """`[B, count]` int64: last_tokens of decoding steps, from the last prompt token to the last but one of the row."""
    shares = torch.from_numpy(rng.random((len(batch.tokens), count))).to(batch.tokens.device)
    first, last_tokens = batch.starts - 1, batch.lengths - batch.starts
    return first[:, None] + (shares * last_tokens[:, None]).long()


def block_labels(tokens: Tensor, lengths: Tensor, anchors: Tensor, block_size: int) -> Tensor:
    """`[B, A, block_size - 1]` int64: the tokens after each anchor, -100 past the end of the sequence."""
    positions = anchors[:, :, None] + torch.arange(1, block_size, device=anchors.device)
    inside = positions < lengths[:, None, None]
    rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None, None]
    return torch.where(inside, tokens[rows, positions.clamp(max=tokens.shape[1] - 1)], IGNORED)


def position_weights(block_size: int, gamma: float, device: torch.device | str | None = None) -> Tensor:
    """exp(-(k-1)/gamma) for k = 1 … block_size-1."""
    return torch.exp(-torch.arange(block_size - 1, device=device) / gamma)


class BlockDrafter:
    """A drafter with its frozen target: from token rows and anchors to hidden states of the drafted positions."""

    def __init__(self, target: Decoder, drafter: DFlashDrafter, max_length: int, device: str) -> None:
        self.target, self.drafter, self.device = target, drafter, device
        self.config = drafter.config
        self.causal = DenseMixer(target.config, max_length, device)
        self.table = rope_table(self.config.decoder, max_length + self.config.block_size, device)

    def hidden(self, tokens: Tensor, anchors: Tensor) -> Tensor:
        """`tokens [B, T]`, `anchors [B, A]` to final hidden states `[B, A, block_size - 1, hidden]`."""
        with torch.no_grad():
            _, features = self.target(tokens, self.causal, self.config.target_layer_ids)
        keys, values = self.drafter.context_kv(self.drafter.context(features))
        size = self.config.block_size
        blocks = tokens.new_full((*anchors.shape, size), self.config.mask_token_id)
        blocks[:, :, 0] = tokens.gather(1, anchors)
        mixer = BlockMixer(self.config, keys, values, anchors, self.table)
        out = self.drafter(self.target.embed(blocks.flatten(1)), mixer)
        return out.unflatten(1, (-1, size))[:, :, 1:]

    def loss(self, batch: TrainingBatch, anchors: Tensor, gamma: float) -> Tensor:
        """Weighted mean loss of the blocks at `anchors [B, A]`."""
        labels = block_labels(batch.tokens, batch.lengths, anchors, self.config.block_size)
        weights = position_weights(self.config.block_size, gamma, self.device) * (labels != IGNORED)
        logits = self.target.logits(self.hidden(batch.tokens, anchors)).float()
        losses = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none", ignore_index=IGNORED)
        return (losses * weights.flatten()).sum() / weights.sum()

    @torch.no_grad()
    def leading(self, batch: TrainingBatch) -> Tensor:
        """`[B, T]` int64: drafts the target accepts behind a root at each position of the continuation."""
        width = int((batch.lengths - batch.starts).max())
        anchors = batch.starts[:, None] - 1 + torch.arange(width, device=batch.tokens.device)
        anchors = torch.minimum(anchors, batch.lengths[:, None] - 1)
        labels = block_labels(batch.tokens, batch.lengths, anchors, self.config.block_size)
        drafted = self.target.logits(self.hidden(batch.tokens, anchors)).argmax(-1)
        return torch.zeros_like(batch.tokens).scatter(1, anchors, leading_hits(drafted == labels))


class BlockObjective(DrafterObjective):
    """Blocks at random anchors of the continuations."""

    title = "DFlash drafter"

    def __init__(
        self, drafting: BlockDrafter, source: ResponseSource, config: DrafterRunConfig, anchors: int, gamma: float
    ) -> None:
        super().__init__(drafting.drafter, source, config)
        self.drafting, self.anchors, self.gamma = drafting, anchors, gamma
        self.draft_lens = (drafting.config.block_size - 1,)

    def hf_config(self) -> dict[str, Any]:
        return self.drafting.config.to_hf()

    def batch_loss(self, batch: TrainingBatch, rng: np.random.Generator) -> Tensor:
        return self.drafting.loss(batch, draw_anchors(batch, self.anchors, rng), self.gamma)

    def leading(self, batch: TrainingBatch) -> Tensor:
        return self.drafting.leading(batch)
