"""DFlash drafters: blocks of masks behind random anchors of the target's text.

For a sequence x and an anchor position a the drafter sees the target's features of positions < a and a block of B
tokens at positions a … a+B-1: the anchor x_a, then masks. Row k of the block predicts x_{a+k}. Decoding has the same
situation: the anchor is the last token, which is verified and not yet in the cache, so it has no features.
Loss (arXiv 2602.06036): sum_k w_k CE_k / sum_k w_k with w_k = exp(-(k-1)/gamma), k = 1 … B-1, where the label exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from tokenizers import Tokenizer
from torch import Tensor

from algorithms.runtime.models.config import DecoderConfig, DFlashConfig
from algorithms.runtime.models.decoder import Decoder, MixerWeights
from algorithms.runtime.models.dense_mixer import DenseMixer, dense_attention, head_norm
from algorithms.runtime.models.drafters.dflash import DFlashDrafter
from algorithms.runtime.models.loading import Target
from algorithms.runtime.models.rope import apply_rope, rope_table
from experiments.training.acceptance import leading_hits
from experiments.training.batches import TrainingBatch
from experiments.training.objectives.drafter import BatchSettings, DrafterObjective, DrafterTraining, draft_decoder
from experiments.training.responses import ResponseSource
from experiments.training.tokenizer import MASK, token_id

IGNORED = -100


@dataclass
class DFlashSettings:
    """Shape of the drafter; the rest is the target's."""

    num_layers: int = 3
    block_size: int = 16
    target_layer_ids: list[int] = field(default_factory=lambda: [1, 2, 3, 4])


@dataclass
class BlockSettings:
    """Anchors of a sequence in one step, and the decay of the position weights."""

    anchors: int = 20
    gamma: float = 7.0


@dataclass
class DFlashTraining(DrafterTraining):
    """Schema of `drafter=dflash`."""

    out_dir: str = "outputs/train_dflash"
    # Measuring drafts from every position of a sequence at once, so few sequences already give many blocks.
    batch: BatchSettings = field(default_factory=lambda: BatchSettings(evaluation_sequences=2))
    drafter: DFlashSettings = field(default_factory=DFlashSettings)
    blocks: BlockSettings = field(default_factory=BlockSettings)

    def objective(self, target: Target, tokenizer: Tokenizer, source: ResponseSource) -> BlockObjective:
        drafter = DFlashDrafter(dflash_config(self.drafter, target.config, token_id(tokenizer, MASK)))
        drafter.reset_parameters()
        drafter.to(self.train.device)
        return BlockObjective(target.model, drafter, source, self)


def dflash_config(settings: DFlashSettings, target: DecoderConfig, mask_token_id: int) -> DFlashConfig:
    """Draft layers shaped like the target's, all with full attention."""
    return DFlashConfig(
        decoder=draft_decoder(target, num_layers=settings.num_layers),
        block_size=settings.block_size,
        target_layer_ids=tuple(settings.target_layer_ids),
        mask_token_id=mask_token_id,
        num_target_layers=target.num_layers,
        causal_layers=(False,) * settings.num_layers,
    )


class BlockMixer:
    """Attention of block tokens over [context; own block].

    `keys`, `values` `[B, T, layers, H_kv, D]` come from `DFlashDrafter.context_kv`; `anchors [B, A]` are the positions
    of the blocks. Block tokens are laid out `[B, A * block_size]`.
    """

    def __init__(self, config: DFlashConfig, keys: Tensor, values: Tensor, anchors: Tensor, table: Tensor) -> None:
        if config.decoder.sliding_windows:
            raise ValueError("training supports draft layers with full attention, got sliding windows")
        self.config, self.keys, self.values, self.table = config.decoder, keys, values, table
        size, device = config.block_size, keys.device
        self.positions = rearrange(anchors[..., None] + torch.arange(size, device=device), "b a k -> b (a k)")
        self.context_positions = torch.arange(keys.shape[1], device=device)
        before = self.context_positions < anchors[:, :, None]
        same = torch.eye(anchors.shape[1], dtype=torch.bool, device=device)
        own = repeat(same, "a other -> b a (other k)", b=len(anchors), k=size)
        self.visible = repeat(torch.cat([before, own], dim=2), "b a s -> b 1 (a k) s", k=size)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, weights: MixerWeights) -> Tensor:
        eps = self.config.rms_norm_eps
        q = apply_rope(head_norm(q, weights.q_norm, eps), self.table, self.positions)
        block = apply_rope(head_norm(k, weights.k_norm, eps), self.table, self.positions)
        context = head_norm(self.keys[:, :, layer], weights.k_norm, eps)
        context = apply_rope(context, self.table, self.context_positions)
        keys = torch.cat([context, block], dim=1)
        values = torch.cat([self.values[:, :, layer].to(v.dtype), v], dim=1)
        return dense_attention(q, keys, values, self.visible, self.config)


def draw_anchors(batch: TrainingBatch, count: int, rng: np.random.Generator) -> Tensor:
    """`[B, count]` int64: last tokens of decoding steps, from the last prompt token to the last but one of the row."""
    uniforms = torch.from_numpy(rng.random((len(batch.tokens), count))).to(batch.tokens.device)
    first, choices = batch.starts - 1, batch.lengths - batch.starts
    return first[:, None] + (uniforms * choices[:, None]).long()


def block_labels(tokens: Tensor, lengths: Tensor, anchors: Tensor, block_size: int) -> Tensor:
    """`[B, A, block_size - 1]` int64: the tokens after each anchor, -100 past the end of the sequence."""
    positions = anchors[:, :, None] + torch.arange(1, block_size, device=anchors.device)
    inside = positions < lengths[:, None, None]
    rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None, None]
    return torch.where(inside, tokens[rows, positions.clamp(max=tokens.shape[1] - 1)], IGNORED)


def position_weights(block_size: int, gamma: float, device: torch.device | str | None = None) -> Tensor:
    """exp(-(k-1)/gamma) for k = 1 … block_size-1."""
    return torch.exp(-torch.arange(block_size - 1, device=device) / gamma)


class BlockObjective(DrafterObjective):
    """Blocks at random anchors of the continuations, behind a frozen target."""

    title = "DFlash drafter"
    model: DFlashDrafter

    def __init__(self, target: Decoder, drafter: DFlashDrafter, source: ResponseSource, config: DFlashTraining) -> None:
        super().__init__(drafter, source, config)
        self.target, self.shape, self.blocks = target, drafter.config, config.blocks
        self.draft_lens = (self.shape.block_size - 1,)
        length = target.config.max_position_embeddings
        self.causal = DenseMixer(target.config, length, self.device)
        self.table = rope_table(self.shape.decoder, length + self.shape.block_size, self.device)

    def hf_config(self) -> dict[str, Any]:
        return self.shape.to_hf()

    def hidden(self, tokens: Tensor, anchors: Tensor) -> Tensor:
        """`tokens [B, T]`, `anchors [B, A]` to final hidden states `[B, A, block_size - 1, hidden]`."""
        with torch.no_grad():
            last, features = self.target(tokens, self.causal, self.shape.target_layer_ids)
        keys, values = self.model.context_kv(self.model.context(features, last))
        size = self.shape.block_size
        blocks = tokens.new_full((*anchors.shape, size), self.shape.mask_token_id)
        blocks[:, :, 0] = tokens.gather(1, anchors)
        mixer = BlockMixer(self.shape, keys, values, anchors, self.table)
        out = self.model(self.target.embed(rearrange(blocks, "b a k -> b (a k)")), mixer)
        return rearrange(out, "b (a k) hidden -> b a k hidden", k=size)[:, :, 1:]

    def batch_loss(self, batch: TrainingBatch, rng: np.random.Generator) -> Tensor:
        anchors = draw_anchors(batch, self.blocks.anchors, rng)
        labels = block_labels(batch.tokens, batch.lengths, anchors, self.shape.block_size)
        weights = position_weights(self.shape.block_size, self.blocks.gamma, self.device) * (labels != IGNORED)
        logits = self.target.logits(self.hidden(batch.tokens, anchors)).float()
        losses = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none", ignore_index=IGNORED)
        return (losses * weights.flatten()).sum() / weights.sum()

    @torch.no_grad()
    def leading(self, batch: TrainingBatch) -> Tensor:
        width = int((batch.lengths - batch.starts).max())
        anchors = batch.starts[:, None] - 1 + torch.arange(width, device=batch.tokens.device)
        anchors = torch.minimum(anchors, batch.lengths[:, None] - 1)
        labels = block_labels(batch.tokens, batch.lengths, anchors, self.shape.block_size)
        drafted = self.target.logits(self.hidden(batch.tokens, anchors)).argmax(-1)
        return torch.zeros_like(batch.tokens).scatter(1, anchors, leading_hits(drafted == labels))
