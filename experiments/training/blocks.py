"""Block drafting on dense rows: the training objective of DFlash and the simulation of its acceptance.

For a sequence x and an anchor position a the drafter sees the target's features of positions < a and a block of B
tokens at positions a … a+B-1: the anchor x_a, then masks. Row k of the block predicts x_{a+k}. This is the situation of
decoding exactly: the anchor is the bonus token, verified but not yet in the cache, so it has no features.
Loss (arXiv 2602.06036): sum_k w_k CE_k / sum_k w_k with w_k = exp(-(k-1)/gamma), k = 1 … B-1, where the label exists.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.runtime.models.config import DFlashConfig
from algorithms.runtime.models.decoder import Decoder
from algorithms.runtime.models.dflash import DFlashDrafter
from algorithms.runtime.models.rope import apply_rope, rope_table
from experiments.training.mixer import DenseMixer, head_norm
from experiments.training.responses import Continuation, pad

IGNORED = -100


class BlockMixer:
    """Attention of block tokens over [context; own block].

    `keys`, `values` `[B, T, layers, H_kv, D]` come from `DFlashDrafter.context_kv`; `anchors [B, A]` are the positions
    of the blocks. Block tokens are laid out `[B, A * block_size]`.
    """

    def __init__(self, config: DFlashConfig, keys: Tensor, values: Tensor, anchors: Tensor, table: Tensor) -> None:
        if "sliding_attention" in config.layer_types:
            raise ValueError("training supports full_attention draft layers, got sliding_attention")
        self.eps = config.decoder.rms_norm_eps
        self.keys, self.values, self.table = keys, values, table
        size, device = config.block_size, keys.device
        self.positions = (anchors[:, :, None] + torch.arange(size, device=device)).flatten(1)
        self.context_positions = torch.arange(keys.shape[1], device=device)
        before = self.context_positions < anchors[:, :, None]
        same = torch.eye(anchors.shape[1], dtype=torch.bool, device=device).expand(anchors.shape[0], -1, -1)
        mask = torch.cat([before, same.repeat_interleave(size, dim=2)], dim=2)
        self.mask = mask.repeat_interleave(size, dim=1)[:, None]

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> Tensor:
        q = apply_rope(head_norm(q, q_norm, self.eps), self.table, self.positions)
        block = apply_rope(head_norm(k, k_norm, self.eps), self.table, self.positions)
        context = head_norm(self.keys[:, :, layer], k_norm, self.eps)
        context = apply_rope(context, self.table, self.context_positions)
        keys = torch.cat([context, block], dim=1).transpose(1, 2)
        values = torch.cat([self.values[:, :, layer].to(v.dtype), v], dim=1).transpose(1, 2)
        group = q.shape[2] // k.shape[2]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, self.mask).transpose(1, 2)


def draw_anchors(sequences: Sequence[Continuation], count: int, rng: random.Random) -> Tensor:
    """`[B, count]` int64 positions in the continuation whose next token exists."""
    rows = []
    for sequence in sequences:
        low, high = sequence.start, max(sequence.start + 1, len(sequence.tokens) - 1)
        rows.append([rng.randrange(low, high) for _ in range(count)])
    return torch.tensor(rows)


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

    def loss(self, sequences: Sequence[Continuation], anchors: Tensor, gamma: float) -> tuple[Tensor, Tensor, int]:
        """Weighted loss sum, weight sum, and the number of predicted tokens."""
        tokens = pad(sequences, 0).to(self.device)
        lengths = torch.tensor([len(s.tokens) for s in sequences], device=self.device)
        anchors = anchors.to(self.device)
        labels = block_labels(tokens, lengths, anchors, self.config.block_size)
        valid = labels != IGNORED
        logits = self.target.logits(self.hidden(tokens, anchors)[valid]).float()
        weights = position_weights(self.config.block_size, gamma, self.device).expand(labels.shape)[valid]
        losses = F.cross_entropy(logits, labels[valid], reduction="none")
        return (losses * weights).sum(), weights.sum(), int(valid.sum())

    @torch.no_grad()
    def drafts(self, sequence: Continuation) -> Tensor:
        """What the drafter proposes at every position of the continuation: `[n, block_size - 1]` int64."""
        tokens = torch.tensor([sequence.tokens], device=self.device)
        anchors = torch.arange(sequence.start, len(sequence.tokens), device=self.device)[None]
        return self.target.logits(self.hidden(tokens, anchors))[0].argmax(-1)


def count_steps(continuation: Sequence[int], drafts: Sequence[Sequence[int]]) -> int:
    """Decoding steps a greedy verifier needs for `continuation`, its first token coming from prefill.

    `drafts[i]` is the proposal made with `continuation[i]` as the anchor.
    """
    position = steps = 0
    while position < len(continuation) - 1:
        accepted = 0
        rest = continuation[position + 1 :]
        for drafted, token in zip(drafts[position], rest, strict=False):
            if drafted != token:
                break
            accepted += 1
        position += accepted + 1
        steps += 1
    return steps


def tokens_per_step(block_drafter: BlockDrafter, sequences: Sequence[Continuation]) -> float:
    """Emitted tokens over decoding steps, pooled over `sequences`; prefill's token is counted on neither side."""
    tokens = steps = 0
    for sequence in sequences:
        continuation = sequence.tokens[sequence.start :]
        steps += count_steps(continuation, block_drafter.drafts(sequence).tolist())
        tokens += len(continuation) - 1
    return tokens / max(steps, 1)
