"""DFlash drafters: blocks of masks behind random anchors of the target's text.

For a sequence x and an anchor position a the drafter sees the target's features of positions < a and a block of B
tokens at positions a … a+B-1: the anchor x_a, then masks. Row k of the block predicts x_{a+k}. Decoding has the same
situation: the anchor is the last token, which is verified and not yet in the cache, so it has no features.
Loss (arXiv 2602.06036): cross entropies weighted by position, see `experiments/training/losses.py`. A Markov head reads
x_{a+k-1}, the token that decoding has drafted there if row k counts at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from algorithms.dflash import DFlash
from algorithms.runtime.models.config import DecoderConfig, DFlashConfig
from algorithms.runtime.models.config.dflash import default_target_layer_ids
from algorithms.runtime.models.decoder import MixerWeights
from algorithms.runtime.models.dense_mixer import DenseMixer, head_norm
from algorithms.runtime.models.drafters.dflash import DFlashDrafter
from algorithms.runtime.models.rope import apply_rope, rope_table
from experiments.training.acceptance import leading_hits
from experiments.training.batches import TrainingBatch
from experiments.training.features import FeatureScales
from experiments.training.losses import IGNORED, WEIGHTINGS, confidence_weights, decay_weights, weighted_mean
from experiments.training.objectives.drafter import DrafterObjective, DrafterTraining, Setting, draft_decoder
from experiments.training.text.markup import mask_token
from specdec_kernels.checks import expect_at_least, expect_between, expect_choice

PUBLISHED_LAYERS = 5
ANCHORS_AT_ONCE = 32
"""Blocks of a row that held-out figures draft in one pass, to bound memory."""


@dataclass
class DFlashSettings:
    """Shape of the drafter; the rest is the target's.

    None takes what the published drafters have: five layers, or half as many as a target of fewer than ten; features
    of as many evenly spaced target layers; and a mask token as `text/markup.py` finds it. `own_mask` trains an
    embedding for the mask instead. `markov_rank` above 0 adds a Markov head of this rank.
    """

    num_layers: int | None = None
    block_size: int = 16
    target_layer_ids: list[int] | None = None
    mask_token_id: int | None = None
    own_mask: bool = False
    markov_rank: int = 0

    def __post_init__(self) -> None:
        expect_at_least("drafter.num_layers", self.num_layers, 1, nullable=True)
        expect_at_least("drafter.block_size", self.block_size, 2)
        expect_at_least("drafter.markov_rank", self.markov_rank, 0)
        if self.own_mask and self.mask_token_id is not None:
            raise ValueError("drafter.own_mask trains a mask of its own: expected no drafter.mask_token_id")


@dataclass
class BlockSettings:
    """`anchors` is the number of blocks in a step, spread evenly over its rows. `weights` is confidence, with `alpha`,
    or decay, with `gamma`. The LM head's logits are computed for `at_once` blocks at a time, to bound memory."""

    anchors: int = 320
    weights: str = "confidence"
    gamma: float = 7.0
    alpha: float = 0.5
    at_once: int = 2048

    def __post_init__(self) -> None:
        expect_at_least("blocks.anchors", self.anchors, 1)
        expect_at_least("blocks.at_once", self.at_once, 1)
        expect_choice("blocks.weights", self.weights, WEIGHTINGS)
        expect_between("blocks.gamma", self.gamma, 0, math.inf, above=True)
        expect_between("blocks.alpha", self.alpha, 0, 1)


@dataclass
class DFlashTraining(DrafterTraining):
    """Schema of `drafter=dflash`."""

    out_dir: str = "outputs/train_dflash"
    drafter: DFlashSettings = field(default_factory=DFlashSettings)
    blocks: BlockSettings = field(default_factory=BlockSettings)

    def objective(self, setting: Setting) -> BlockObjective:
        target = setting.target.config
        mask = self.drafter.mask_token_id
        if mask is None:
            own = self.drafter.own_mask
            mask = target.vocab_size if own else mask_token(setting.tokenizer, target.vocab_size)
        drafter = DFlashDrafter(dflash_config(self.drafter, target, mask))
        drafter.reset_parameters()
        drafter.to(self.train.device)
        # The target's head reads what the target's final norm gives.
        drafter.norm.load_state_dict(setting.target.model.model.norm.state_dict())
        return BlockObjective(drafter, setting, self.blocks)


def dflash_config(settings: DFlashSettings, target: DecoderConfig, mask_token_id: int) -> DFlashConfig:
    """Draft layers shaped like the target's, all with full attention."""
    layers = settings.num_layers or min(PUBLISHED_LAYERS, max(1, target.num_layers // 2))
    ids = settings.target_layer_ids or default_target_layer_ids(target.num_layers, layers)
    return DFlashConfig(
        decoder=draft_decoder(target, num_layers=layers),
        block_size=settings.block_size,
        target_layer_ids=tuple(sorted(ids)),
        mask_token_id=mask_token_id,
        num_target_layers=target.num_layers,
        causal_layers=(False,) * layers,
        markov_rank=settings.markov_rank,
    )


class BlockMixer:
    """Attention of block tokens over [context; own block].

    `keys`, `values` `[B, T, layers, H_kv, D]` come from `DFlashDrafter.context_kv`; `anchors [B, A]` are the positions
    of the blocks. Block tokens are laid out `[B, A * block_size]`. Scores of the context and of the block are computed
    apart and share one softmax, so no block computes scores of another one's tokens.
    """

    def __init__(self, config: DFlashConfig, keys: Tensor, values: Tensor, anchors: Tensor, table: Tensor) -> None:
        if config.decoder.sliding_windows:
            raise ValueError("training supports draft layers with full attention, got sliding windows")
        self.config, self.keys, self.values, self.table = config.decoder, keys, values, table
        self.size, device = config.block_size, keys.device
        self.positions = rearrange(anchors[..., None] + torch.arange(self.size, device=device), "b a k -> b (a k)")
        self.context_positions = torch.arange(keys.shape[1], device=device)
        self.hidden = rearrange(self.context_positions >= anchors[:, :, None], "b a s -> b 1 1 a 1 s")

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, weights: MixerWeights) -> Tensor:
        eps, table = self.config.rms_norm_eps, self.table
        q = apply_rope(head_norm(q, weights.q_norm, eps), table, self.positions)
        block = apply_rope(head_norm(k, weights.k_norm, eps), table, self.positions)
        context = apply_rope(head_norm(self.keys[:, :, layer], weights.k_norm, eps), table, self.context_positions)
        return self._attended(q * q.shape[-1] ** -0.5, context, self.values[:, :, layer].to(v.dtype), block, v)

    def _attended(self, q: Tensor, keys: Tensor, values: Tensor, block_keys: Tensor, block_values: Tensor) -> Tensor:
        """`q [B, A * K, H, D]`, already scaled, over `keys`/`values` `[B, T, H_kv, D]` and `block_…` `[B, A * K, H_kv,
        D]`; query head h reads KV head h // (H / H_kv)."""
        sizes = {"k": self.size, "h": keys.shape[2]}
        q = rearrange(q, "b (a k) (h g) d -> b h g a k d", **sizes)
        own = [rearrange(x, "b (a k) h d -> b h 1 a k d", **sizes) for x in (block_keys, block_values)]
        shape, length = q.shape, keys.shape[1]
        rows = q.flatten(2, 4)
        text = (rows @ rearrange(keys, "b s h d -> b h d s")).view(*shape[:-1], length)
        text = text.masked_fill(self.hidden, float("-inf"))
        scores = torch.cat([text, q @ own[0].transpose(-1, -2)], dim=-1)
        shares = scores.softmax(-1, dtype=torch.float32).to(block_values.dtype)
        out = shares[..., :length].flatten(2, 4) @ rearrange(values, "b s h d -> b h s d")
        out = out.view(shape) + shares[..., length:] @ own[1]
        return rearrange(out, "b h g a k d -> b (a k) (h g) d")


def draw_anchors(batch: TrainingBatch, count: int, rng: np.random.Generator) -> Tensor:
    """`[B, count]` int64, rising: last tokens of decoding steps, from the last prompt token to the last but one of the
    row. One lies in each of `count` equal parts, so they differ where a row has as many."""
    places = (np.arange(count) + rng.random((len(batch.tokens), count))) / count
    uniforms = torch.from_numpy(places).to(batch.tokens.device)
    first, choices = batch.starts - 1, batch.lengths - batch.starts
    return first[:, None] + (uniforms * choices[:, None]).long().clamp(max=(choices - 1)[:, None])


def block_labels(tokens: Tensor, lengths: Tensor, anchors: Tensor, block_size: int) -> Tensor:
    """`[B, A, block_size - 1]` int64: the tokens after each anchor, -100 past the end of the sequence."""
    positions = anchors[:, :, None] + torch.arange(1, block_size, device=anchors.device)
    inside = positions < lengths[:, None, None]
    rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None, None]
    return torch.where(inside, tokens[rows, positions.clamp(max=tokens.shape[1] - 1)], IGNORED)


class BlockObjective(DrafterObjective):
    """Blocks at random anchors of the continuations, behind a frozen target."""

    title = "DFlash drafter"
    added_parts = ("markov_head.",)
    model: DFlashDrafter

    def __init__(self, drafter: DFlashDrafter, setting: Setting, blocks: BlockSettings) -> None:
        super().__init__(drafter, setting)
        self.target, self.shape, self.blocks = setting.target.model, drafter.config, blocks
        self.draft_len = self.shape.block_size - 1
        length = self.target.config.max_position_embeddings
        self.causal = DenseMixer(self.target.config, length, self.device)
        self.table = rope_table(self.shape.decoder, length + self.shape.block_size, self.device)
        sample = self.training.sample()
        self.scales = FeatureScales.measured(self._features(sample.tokens), sample.within)

    def hf_config(self) -> dict[str, Any]:
        return self.shape.to_hf()

    def methods(self) -> dict[str, Any]:
        return {f"block_{self.shape.block_size}": DFlash.Config(), "tree_32": DFlash.Config(topk=8, num_nodes=32)}

    def context(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of every draft layer for `tokens [B, T]`, `[B, T, layers, H_kv, D]` each."""
        scaled = self.scales(self._features(tokens))
        # Of the last layer the drafter reads the final hidden states, which `_features` has put there.
        return self.model.context_kv(self.model.context(scaled, scaled[-1]))

    @torch.no_grad()
    def _features(self, tokens: Tensor) -> list[Tensor]:
        """What the drafter reads of the target at each of its layers, `[B, T, hidden]` each."""
        ids = self.shape.target_layer_ids
        hidden, features = self.target(tokens, self.causal, ids)
        return [*features[:-1], hidden] if ids[-1] == self.shape.num_target_layers - 1 else features

    def hidden(self, tokens: Tensor, anchors: Tensor, context: tuple[Tensor, Tensor]) -> Tensor:
        """`tokens [B, T]`, `anchors [B, A]` to final hidden states `[B, A, block_size - 1, hidden]`."""
        size = self.shape.block_size
        mixer = BlockMixer(self.shape, *context, anchors, self.table)
        blocks = self.model.embed_block(self.target, tokens.gather(1, anchors), size)
        out = self.model(rearrange(blocks, "b a k hidden -> b (a k) hidden"), mixer)
        return rearrange(out, "b (a k) hidden -> b a k hidden", k=size)[:, :, 1:]

    def logits(self, hidden: Tensor, anchors: Tensor, labels: Tensor) -> Tensor:
        """`hidden [..., K, hidden]` of blocks behind the tokens `anchors [...]` to `[..., K, V]`, every draft behind
        right ones: those of `labels [..., K]`."""
        logits = self.target.logits(hidden)
        if self.model.markov_head is None:
            return logits
        before = torch.cat([anchors[..., None], labels[..., :-1].clamp(min=0)], dim=-1)
        return logits + self.model.markov_head(before)

    def _cross_entropies(self, hidden: Tensor, anchors: Tensor, labels: Tensor) -> Tensor:
        """[N, K] float32; 0 where there is no label."""
        logits = self.logits(hidden, anchors, labels).float()
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED)
        return losses.view_as(labels)

    def cross_entropies(self, hidden: Tensor, anchors: Tensor, labels: Tensor) -> Tensor:
        """`hidden [N, K, hidden]`, tokens `anchors [N]` and `labels [N, K]` to `[N, K]`, part by part. The logits of
        several parts are computed again for the gradient, so that one part's are in memory."""
        parts = list(zip(*(x.split(self.blocks.at_once) for x in (hidden, anchors, labels)), strict=True))
        if len(parts) == 1:
            return self._cross_entropies(*parts[0])
        return torch.cat([checkpoint(self._cross_entropies, *part, use_reentrant=False) for part in parts])

    def batch_loss(self, batch: TrainingBatch, rng: np.random.Generator) -> Tensor:
        rows = len(batch.tokens)
        anchors = draw_anchors(batch, -(-self.blocks.anchors // rows), rng)
        labels = block_labels(batch.tokens, batch.lengths, anchors, self.shape.block_size).flatten(0, 1)
        hidden = self.hidden(batch.tokens, anchors, self.context(batch.tokens)).flatten(0, 1)
        losses = self.cross_entropies(hidden, batch.tokens.gather(1, anchors).flatten(), labels)
        labelled = labels != IGNORED
        if self.blocks.weights == "confidence":
            return weighted_mean(losses, confidence_weights(losses, labelled, self.blocks.alpha))
        return weighted_mean(losses, decay_weights(self.shape.block_size, self.blocks.gamma, self.device) * labelled)

    @torch.no_grad()
    def leading(self, batch: TrainingBatch) -> Tensor:
        context, found = self.context(batch.tokens), torch.zeros_like(batch.tokens)
        for anchors in self._all_anchors(batch):
            labels = block_labels(batch.tokens, batch.lengths, anchors, self.shape.block_size)
            hidden = self.hidden(batch.tokens, anchors, context)
            drafted = self.logits(hidden, batch.tokens.gather(1, anchors), labels).argmax(-1)
            found.scatter_(1, anchors, leading_hits(drafted == labels))
        return found

    def _all_anchors(self, batch: TrainingBatch) -> Iterator[Tensor]:
        """`[B, A]` int64, some at a time: from the last prompt token of each row to its end."""
        width = int((batch.lengths - batch.starts).max())
        for first in range(0, width, ANCHORS_AT_ONCE):
            steps = torch.arange(first, min(first + ANCHORS_AT_ONCE, width), device=self.device)
            yield torch.minimum(batch.starts[:, None] - 1 + steps, batch.lengths[:, None] - 1)
