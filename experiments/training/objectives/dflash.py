"""Block drafters (DFlash, DSpark, Domino, DFlash 2): blocks of masks after random anchors of the target's text.

For a sequence x and an anchor position a the drafter sees the target's features of positions < a and a block of B
tokens at positions a … a+B-1: the anchor x_a, then masks. The k-th draft of the block, k = 1 … K, predicts x_{a+k}: row
k of the block, or row k - 1 with `slots=next`. Decoding has the same situation: the anchor is the last token, which is
verified and not yet in the cache, so it has no features. A head reads the tokens up to x_{a+k-1}, which decoding has
drafted there if draft k counts.

With p the target's distribution of x_{a+k}, q the drafter's, s its `token_share` and z the logit of a confidence head,

    loss_k = s (c CE_k + d CE'_k) + (1 - s) |p - q|_1 + BCE(sigmoid(z), 1 - |p - q|_1 / 2),

where the last term is that of drafters with such a head, and its label has no gradient (github.com/deepseek-ai/DeepSpec
with s = 0.1: rejection accepts a draft of q with probability 1 - |p - q|_1 / 2). CE' is of the logits before the head:

* Domino: d falls from 1 to 0 in the first `plain_until` of the run and c = 1 - d, so that the layers are trained before
  the head (github.com/sgl-project/SpecForge);
* DFlash 2: d = 1 and c = `selector_weight`, where CE is over the selector's candidates and the label
  (github.com/vllm-project/speculators);
* others: c = 1 and d = 0.

A draft helps only if all drafts before it are right. So the k-th of a block weighs w_k, and the loss of a batch is
sum w_k loss_k / sum w_k over all drafts that have a label:

* `decay`: w_k = exp(-(k - 1) / gamma), as DFlash is published (arXiv 2602.06036);
* `confidence`: D-PACE (arXiv 2605.18810, equations 7 and 8). With q_k = exp(-CE_k), the drafter's own probability of
  the label, and q~_k = (1 - alpha) q_k + alpha,

      w_k = sum over m >= k of the product of q~_1 … q~_m,

  the share of the smoothed expected length that passes through draft k. No gradient flows through weights. Here the
  weighted mean is over the batch, as for `decay`, so learning rates mean the same for both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from algorithms.dflash.config import DFlashConfig, default_target_layer_ids
from algorithms.dflash.drafting import DFlash
from algorithms.dflash.model import DFlashDrafter
from algorithms.models.dense_mixer import DenseMixer
from algorithms.models.folder import ModelError
from algorithms.models.layers import MixerWeights, apply_rope, head_norm, rope_table
from algorithms.models.tokenizer import Tokenizer
from experiments.training.batches import TrainingBatch
from experiments.training.corpus import IGNORED
from experiments.training.objectives import block_settings as settings
from experiments.training.objectives import drafter as base
from experiments.training.objectives.block_heads import corrected
from experiments.training.text.prompt_sources import PROBE

PUBLISHED_LAYERS = 5
ANCHORS_AT_ONCE = 32  # blocks of a row that held-out figures draft in one pass, to bound memory


@dataclass
class BlockTraining(base.DrafterTraining):
    """What the schemas of block drafters share."""

    drafter: settings.ShapeSettings = field(default_factory=settings.ShapeSettings)
    blocks: settings.BlockSettings = field(default_factory=settings.BlockSettings)

    def objective(self, setting: base.Setting) -> BlockObjective:
        target, shape = setting.target.config, self.drafter
        mask = shape.mask_token_id
        if mask is None:
            mask = target.vocab_size if shape.own_mask else mask_token(setting.tokenizer, target.vocab_size)
        layers = shape.num_layers or min(PUBLISHED_LAYERS, max(1, target.num_layers // 2))
        read = shape.target_layer_ids or default_target_layer_ids(target.num_layers, layers)
        config = DFlashConfig(
            decoder=base.draft_decoder(target, num_layers=layers),
            block_size=shape.block_size,
            target_layer_ids=tuple(sorted(read)),
            mask_token_id=mask,
            num_target_layers=target.num_layers,
            causal_layers=(shape.causal,) * layers,
            slots=shape.slots,
            **shape.parts(),
        )
        drafter = DFlashDrafter(config)
        drafter.reset_parameters()
        drafter.to(self.train.device)
        # The target's head reads what the target's final norm gives.
        drafter.norm.load_state_dict(setting.target.model.model.norm.state_dict())
        return BlockObjective(drafter, setting, self.blocks)


@dataclass
class DFlashTraining(BlockTraining):
    drafter: settings.DFlashSettings = field(default_factory=settings.DFlashSettings)


@dataclass
class DSparkTraining(BlockTraining):
    """Schema of `drafter=dspark`: the shape and the loss of DeepSpec's DSpark."""

    drafter: settings.DSparkSettings = field(default_factory=settings.DSparkSettings)
    blocks: settings.BlockSettings = field(
        default_factory=lambda: settings.BlockSettings(weights="decay", gamma=4.0, token_share=0.1)
    )


@dataclass
class DominoTraining(BlockTraining):
    """Schema of `drafter=domino`: the shape and the loss of SpecForge's Domino."""

    drafter: settings.DominoSettings = field(default_factory=settings.DominoSettings)
    blocks: settings.BlockSettings = field(
        default_factory=lambda: settings.BlockSettings(weights="decay", plain_until=1.0)
    )


@dataclass
class DFlash2Training(BlockTraining):
    """Schema of `drafter=dflash2`: the shape of z-lab's DFlash 2."""

    drafter: settings.DFlash2Settings = field(default_factory=settings.DFlash2Settings)


def mask_token(tokenizer: Tokenizer, vocab_size: int) -> int:
    """Id of the token that means "to be drafted" in DFlash's blocks.

    It is the tokenizer's mask token; else the first row of the embedding after the vocabulary, as in the drafters
    published for Qwen3; else the last special token that neither the chat template nor the tokenizer's config uses;
    else `vocab_size`, the number of a row that the drafter owns.
    """
    special, named = tokenizer.special_ids(), tokenizer.special_tokens
    if (mask := special.get(named.get("mask_token", ""))) is not None:
        return mask
    if tokenizer.size < vocab_size:
        return tokenizer.size
    try:
        used = tokenizer.render([PROBE])
    except ModelError:
        used = ""
    free = [i for t, i in special.items() if t not in named.values() and t not in used and i not in tokenizer.eos_ids]
    return max(free, default=vocab_size)


class BlockMixer:
    """Attention of block tokens `[B, A, block_size]` over [context; own block].

    `keys`, `values` `[B, T, layers, H_kv, D]` come from `DFlashDrafter.context_kv`; `anchors [B, A]` are the positions
    of the blocks. Scores of the context and of the block are computed
    apart and share one softmax, so no block computes scores of another one's tokens.
    """

    def __init__(self, config: DFlashConfig, keys: Tensor, values: Tensor, anchors: Tensor, table: Tensor) -> None:
        self.config, self.keys, self.values, self.table = config.decoder, keys, values, table
        size, device = config.block_size, keys.device
        self.positions = anchors[..., None] + torch.arange(size, device=device)
        self.context_positions = torch.arange(keys.shape[1], device=device)
        self.hidden = rearrange(self.context_positions >= anchors[:, :, None], "b a s -> b 1 1 a 1 s")
        self.causal_layers = config.causal_layers
        self.future = torch.ones(size, size, dtype=torch.bool, device=device).triu(1)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, weights: MixerWeights) -> Tensor:
        eps, table = self.config.rms_norm_eps, self.table
        q = apply_rope(head_norm(q, weights.q_norm, eps), table, self.positions)
        block = apply_rope(head_norm(k, weights.k_norm, eps), table, self.positions)
        keys = apply_rope(head_norm(self.keys[:, :, layer], weights.k_norm, eps), table, self.context_positions)
        values = self.values[:, :, layer].to(v.dtype)
        # Query head h reads KV head h // (H / H_kv).
        q = rearrange(q * q.shape[-1] ** -0.5, "b a k (h g) d -> b h g a k d", h=keys.shape[2])
        own = [rearrange(x, "b a k h d -> b h 1 a k d") for x in (block, v)]
        shape, length = q.shape, keys.shape[1]
        rows = q.flatten(2, 4)
        text = (rows @ rearrange(keys, "b s h d -> b h d s")).view(*shape[:-1], length)
        text = text.masked_fill(self.hidden, float("-inf"))
        among = q @ own[0].transpose(-1, -2)
        if self.causal_layers[layer]:
            among = among.masked_fill(self.future, float("-inf"))
        scores = torch.cat([text, among], dim=-1)
        shares = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
        out = shares[..., :length].flatten(2, 4) @ rearrange(values, "b s h d -> b h s d")
        out = out.view(shape) + shares[..., length:] @ own[1]
        return rearrange(out, "b h g a k d -> b a k (h g) d")


def sample_anchors(batch: TrainingBatch, count: int, rng: np.random.Generator) -> Tensor:
    """`[B, count]` int64, rising: last tokens of decoding steps, from the last prompt token to the last but one of the
    row, one in each of `count` equal parts."""
    places = (np.arange(count) + rng.random((len(batch.tokens), count))) / count
    uniforms = torch.from_numpy(places).to(batch.tokens.device)
    first, choices = batch.starts - 1, batch.lengths - batch.starts
    return first[:, None] + (uniforms * choices[:, None]).long().clamp(max=(choices - 1)[:, None])


def after_anchors(values: Tensor, anchors: Tensor, offsets: range) -> Tensor:
    """`values [B, T, ...]` at each anchor plus each of `offsets`, `[B, A, len(offsets), ...]`; past the end the last
    ones."""
    positions = anchors[:, :, None] + torch.arange(offsets.start, offsets.stop, device=anchors.device)
    rows = torch.arange(values.shape[0], device=values.device)[:, None, None]
    return values[rows, positions.clamp(max=values.shape[1] - 1)]


def block_labels(tokens: Tensor, lengths: Tensor, anchors: Tensor, drafts: int) -> Tensor:
    """`[B, A, drafts]` int64: the tokens after each anchor, -100 past the end of the sequence."""
    inside = anchors[:, :, None] + torch.arange(1, drafts + 1, device=anchors.device) < lengths[:, None, None]
    return torch.where(inside, after_anchors(tokens, anchors, range(1, drafts + 1)), IGNORED)


def decay_weights(drafts: int, gamma: float, device: torch.device | str | None = None) -> Tensor:
    """exp(-(k - 1) / gamma) for k = 1 … drafts."""
    return torch.exp(-torch.arange(drafts, device=device) / gamma)


def confidence_weights(losses: Tensor, labelled: Tensor, alpha: float) -> Tensor:
    """D-PACE weights `[..., K]` from the cross entropies `losses [..., K]`; zero where not `labelled`, which a block is
    up to the end of its text."""
    smoothed = torch.where(labelled, (1 - alpha) * torch.exp(-losses.detach()) + alpha, 0.0)
    reached = smoothed.cumprod(-1)
    return reached.flip(-1).cumsum(-1).flip(-1)


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """`[N, K]` of `logits [N, K, V]`; 0 without a label."""
    flat = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED)
    return flat.view_as(labels)


def weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    """sum w loss / sum w; zero where nothing has a weight."""
    return (losses * weights).sum() / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)


class BlockObjective(base.DrafterObjective):
    """Blocks at random anchors of the continuations, with a frozen target."""

    title = "block drafter"
    added_parts = ("markov_head.", "confidence_head.", "gru_head.", "candidate_selector.", "_conv.")
    model: DFlashDrafter

    def __init__(self, drafter: DFlashDrafter, setting: base.Setting, blocks: settings.BlockSettings) -> None:
        self.shape, self.blocks = drafter.config, blocks
        super().__init__(drafter, setting, self.shape.num_drafts(self.shape.block_size))
        drafter.bind(self.target)
        self.compares = blocks.token_share < 1 or drafter.confidence_head is not None
        self.causal = DenseMixer(self.target.config, self.length, self.device)
        self.table = rope_table(self.shape.decoder, self.length + self.shape.block_size, self.device)
        self.scales = self.channel_scales()

    def methods(self) -> dict[str, Any]:
        return {f"block_{self.shape.block_size}": DFlash.Config(), "tree_32": DFlash.Config(topk=8, num_nodes=32)}

    @torch.no_grad()
    def read_target(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        ids = self.shape.target_layer_ids
        hidden, features = self.target(tokens, self.causal, ids)
        is_last = ids[-1] == self.shape.num_target_layers - 1
        return hidden, [*features[:-1], hidden] if is_last else features

    def context(self, features: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of every draft layer, `[B, T, layers, H_kv, D]` each."""
        scaled = self.scaled(features)
        # The drafter reads the final hidden states of the last layer, which `read_target` has put there.
        return self.model.context_kv(self.model.context(scaled, scaled[-1]))

    def hidden(self, tokens: Tensor, anchors: Tensor, context: tuple[Tensor, Tensor]) -> Tensor:
        """`tokens [B, T]`, `anchors [B, A]` to final hidden states of the drafts, `[B, A, K, hidden]`."""
        mixer, first = BlockMixer(self.shape, *context, anchors, self.table), self.shape.first_slot
        blocks = self.model.embed_block(tokens.gather(1, anchors), self.shape.block_size)
        return self.model(blocks, mixer)[:, :, first : first + self.draft_len]

    def logits(self, hidden: Tensor, before: Tensor) -> Tensor:
        """`hidden [..., K, hidden]` of drafts that each follow the token `before [..., K]` to `[..., K, V]`."""
        return corrected(self.model, self.model.logits(hidden), hidden, before)

    def _shares(self, progress: float) -> tuple[float, float]:
        """Weights c and d of the cross entropies after and before the head's correction."""
        if self.model.candidate_selector is not None:
            return self.blocks.selector_weight, 1.0
        until = self.blocks.plain_until
        plain = max(0.0, 1 - progress / until) if until else 0.0
        return 1 - plain, plain

    def _distances(self, logits: Tensor, target: Tensor) -> Tensor:
        """[...] float32: |p - q|_1 of drafts with `logits [..., V]`, where the target's hidden states are `target`."""
        with torch.no_grad():
            probs = self.target.logits(target).float().softmax(-1)
        return (probs - logits.softmax(-1)).abs().sum(-1)

    def _confidence_loss(self, hidden: Tensor, before: Tensor, distances: Tensor) -> Tensor:
        """[...]: cross entropy of the confidence head against the probability that rejection accepts the draft."""
        head, markov = self.model.confidence_head, self.model.markov_head
        assert head is not None
        e = markov.markov_w1(before) if markov is not None and head.reads_token else None
        accepted = (1 - distances.detach() / 2).clamp(0, 1)
        return F.binary_cross_entropy_with_logits(head.logits(hidden, e), accepted, reduction="none")

    def _losses(self, progress: float, hidden: Tensor, before: Tensor, labels: Tensor, *target: Tensor) -> Tensor:
        plain = self.model.logits(hidden)
        logits = corrected(self.model, plain, hidden, before, labels).float()
        after_head, before_head = self._shares(progress)
        entropies = cross_entropies(logits, labels)
        losses = after_head * entropies
        if before_head:
            losses = losses + before_head * cross_entropies(plain.float(), labels)
        if self.compares:
            distances = self._distances(logits, *target)
            share = self.blocks.token_share
            losses = share * losses + (1 - share) * distances
            if self.model.confidence_head is not None:
                losses = losses + self._confidence_loss(hidden, before, distances)
        return torch.stack([losses, entropies])

    def losses(self, progress: float, *drafts: Tensor) -> Tensor:
        """Loss and cross entropy of each draft, `[2, N, K]` float32, part by part. `drafts` are hidden states `[N, K,
        hidden]`, tokens before and labels `[N, K]`, and the target's hidden states where the loss compares
        distributions; drafts without a label count for nothing. Several parts compute their logits again for the
        gradient, so that memory holds the logits of one part."""
        parts = list(zip(*(x.split(self.blocks.at_once) for x in drafts), strict=True))
        if len(parts) == 1:
            return self._losses(progress, *parts[0])
        computed = partial(checkpoint, self._losses, progress, use_reentrant=False)
        return torch.cat([computed(*part) for part in parts], dim=1)

    def batch_loss(self, batch: TrainingBatch, rng: np.random.Generator, progress: float = 1.0) -> Tensor:
        anchors = sample_anchors(batch, -(-self.blocks.anchors // len(batch.tokens)), rng)
        labels = block_labels(batch.tokens, batch.lengths, anchors, self.draft_len)
        target, features = self.read_target(batch.tokens)
        before = range(self.draft_len)
        drafts = [
            self.hidden(batch.tokens, anchors, self.context(features)),
            after_anchors(batch.tokens, anchors, before),
            labels,
            *([after_anchors(target, anchors, before)] if self.compares else []),
        ]
        losses, entropies = self.losses(progress, *(each.flatten(0, 1) for each in drafts))
        labelled = labels.flatten(0, 1) != IGNORED
        if self.blocks.weights == "confidence":
            return weighted_mean(losses, confidence_weights(entropies, labelled, self.blocks.alpha))
        return weighted_mean(losses, decay_weights(self.draft_len, self.blocks.gamma, self.device) * labelled)

    @torch.no_grad()
    def leading(self, batch: TrainingBatch) -> Tensor:
        found = torch.zeros_like(batch.tokens)
        context = self.context(self.read_target(batch.tokens)[1])
        steps = torch.arange(int((batch.lengths - batch.starts).max()), device=self.device)
        for some in steps.split(ANCHORS_AT_ONCE):
            # From the last prompt token of each row to its end.
            anchors = torch.minimum(batch.starts[:, None] - 1 + some, batch.lengths[:, None] - 1)
            labels = block_labels(batch.tokens, batch.lengths, anchors, self.draft_len)
            hidden = self.hidden(batch.tokens, anchors, context)
            before = after_anchors(batch.tokens, anchors, range(self.draft_len))
            drafted = self.logits(hidden, before).argmax(-1)
            found.scatter_(1, anchors, base.leading_hits(drafted == labels))
        return found


SCHEMAS = {
    "dflash": DFlashTraining, "dflash2": DFlash2Training, "domino": DominoTraining, "dspark": DSparkTraining,
}  # fmt: skip
