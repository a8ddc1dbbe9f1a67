"""EAGLE heads, trained unrolled: every position of a row drafts a chain of its own, all at once.

Chain i begins with the pair (x_{i+1}, f_i). In step k (0, 1, …) its input is token x_{i+1+k} with the feature that step
k - 1 returned, at rotary position i + k. It attends to the first-step keys of chains j <= i, which stand for the text,
and to the keys of its own earlier steps, which stand for its drafts. So step k sees what the k-th draft of a decoding
step behind last token x_{i+1} sees, as long as the drafts before it were accepted (training-time test of EAGLE-3,
arXiv 2503.01840).

With p the target's distribution of x_{i+2+k} over the draft vocabulary and q the head's,
    loss = sum_k 0.8^k [ -sum_v p(v) log q(v) + c smoothL1(h_{i+1+k}, f_{i+1+k}) ] / sum_k 0.8^k
where c > 0 for EAGLE only: its head returns features, while the states of EAGLE-3 are free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from algorithms.eagle import Eagle
from algorithms.runtime.models.config import DecoderConfig, EagleConfig
from algorithms.runtime.models.decoder import MixerWeights
from algorithms.runtime.models.dense_mixer import DenseMixer, head_norm
from algorithms.runtime.models.drafters.eagle import Eagle3Drafter, EagleDrafter
from algorithms.runtime.models.rope import apply_rope, rope_table
from experiments.training.acceptance import leading_hits
from experiments.training.batches import TrainingBatch, shifted
from experiments.training.features import FeatureScales
from experiments.training.objectives.drafter import DrafterObjective, DrafterTraining, Setting, draft_decoder
from specdec_kernels.checks import expect_at_least

STEP_DISCOUNT = 0.8


@dataclass
class ChainSettings:
    """`steps` drafts are unrolled; `feature_weight` is c of the loss."""

    steps: int = 6
    feature_weight: float = 0.0

    def __post_init__(self) -> None:
        expect_at_least("chain.steps", self.steps, 1)
        expect_at_least("chain.feature_weight", self.feature_weight, 0)


@dataclass
class HeadSettings:
    """Width of the head's MLP; None takes the target's, as for the rest of the shape."""

    intermediate_size: int | None = None


@dataclass
class EagleTraining(DrafterTraining):
    """Schema of `drafter=eagle`."""

    out_dir: str = "outputs/train_eagle"
    drafter: HeadSettings = field(default_factory=HeadSettings)
    chain: ChainSettings = field(default_factory=lambda: ChainSettings(steps=6, feature_weight=0.5))

    def objective(self, setting: Setting) -> ChainObjective:
        drafter = EagleDrafter(EagleConfig(head_config(self.drafter, setting.target.config)))
        drafter.bind(setting.target.model)
        drafter.reset_parameters()
        drafter.to(self.train.device)
        return ChainObjective("EAGLE head", drafter, setting, self.chain, Eagle.Config)


def head_config(settings: HeadSettings, target: DecoderConfig) -> DecoderConfig:
    """One Llama layer of the target's size, as the published heads are."""
    return draft_decoder(
        target,
        architecture="llama",
        qk_norm=False,
        qkv_bias=False,
        o_bias=False,
        num_layers=1,
        intermediate_size=settings.intermediate_size or target.intermediate_size,
        tie_word_embeddings=False,
    )


class ChainMixer:
    """Attention of a one-layer head over rows `[B, T]`, unrolled; each call is the next step."""

    def __init__(self, config: DecoderConfig, table: Tensor) -> None:
        if config.num_layers != 1:
            raise ValueError(f"unrolled training supports heads of one layer, got {config.num_layers}")
        self.config, self.table = config, table
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, weights: MixerWeights) -> Tensor:
        positions = torch.arange(q.shape[1], device=q.device) + len(self.keys)
        q = apply_rope(head_norm(q, weights.q_norm, self.config.rms_norm_eps), self.table, positions)
        k = apply_rope(head_norm(k, weights.k_norm, self.config.rms_norm_eps), self.table, positions)
        q, group = rearrange(q, "b t h d -> b h t d"), q.shape[2] // k.shape[2]
        self.keys.append(repeat(k, "b t h d -> b (h group) t d", group=group))
        self.values.append(repeat(v, "b t h d -> b (h group) t d", group=group))
        if len(self.keys) == 1:
            out = F.scaled_dot_product_attention(q, self.keys[0], self.values[0], is_causal=True)
        else:
            out = self._over_text_and_chain(q * q.shape[-1] ** -0.5)
        return rearrange(out, "b h t d -> b t h d")

    def _over_text_and_chain(self, q: Tensor) -> Tensor:
        length = q.shape[2]
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        text = (q @ rearrange(self.keys[0], "b h s d -> b h d s")).masked_fill(future, float("-inf"))
        own = [(q * key).sum(-1, keepdim=True) for key in self.keys[1:]]
        shares = torch.cat([text, *own], dim=-1).softmax(-1, dtype=torch.float32).to(q.dtype)
        out = shares[..., :length] @ self.values[0]
        for index, value in enumerate(self.values[1:]):
            out = out + shares[..., length + index, None] * value
        return out


class ChainObjective(DrafterObjective):
    """Unrolled training of an EAGLE or EAGLE-3 head bound to its target."""

    model: EagleDrafter | Eagle3Drafter

    def __init__(
        self,
        title: str,
        drafter: EagleDrafter | Eagle3Drafter,
        setting: Setting,
        chain: ChainSettings,
        algorithm: type[Eagle.Config],
    ) -> None:
        super().__init__(drafter, setting)
        self.title, self.target, self.chain, self._algorithm = title, setting.target.model, chain, algorithm
        self.draft_len = chain.steps
        length = self.target.config.max_position_embeddings
        self.mixer = DenseMixer(self.target.config, length, self.device)
        self.table = rope_table(drafter.config.decoder, length + chain.steps, self.device)
        self._learn_vocabulary()
        sample = self.training.sample()
        self.scales = FeatureScales.measured(self._read_target(sample.tokens)[1], sample.within)

    def start_from(self, folder: Path) -> None:
        super().start_from(folder)
        self._learn_vocabulary()

    def _learn_vocabulary(self) -> None:
        """Which tokens the head drafts, and what of the target's LM head the loss needs for them."""
        vocabulary = self.model.to_target(torch.arange(self.model.draft_vocab_size, device=self.device))
        self.known = torch.zeros(self.target.config.vocab_size, dtype=torch.bool, device=self.device)
        self.known[vocabulary] = True
        head = self.target.lm_head or self.target.model.embed_tokens
        self.head_rows = head.weight.detach()[vocabulary]  # [draft vocabulary, hidden]

    def hf_config(self) -> dict[str, Any]:
        return self.model.config.to_hf()

    def methods(self) -> dict[str, Any]:
        """A chain and a tree as long as what was unrolled, and the short chain that engines serve by default."""
        steps, children = self.chain.steps, min(10, self.model.draft_vocab_size)
        found = {f"chain_{length}": self._algorithm(steps=length) for length in dict.fromkeys((min(3, steps), steps))}
        return {**found, f"tree_{steps}_{children}_32": self._algorithm(steps=steps, topk=children, num_nodes=32)}

    def unroll(self, tokens: Tensor, hidden: Tensor, features: list[Tensor]) -> list[Tensor]:
        """What each step returns, `[B, T, hidden]`, for the target's final `hidden` and captured `features`."""
        state = self.model.fuse(self.scales(features), hidden)
        mixer, states = ChainMixer(self.model.config.decoder, self.table), []
        for step in range(self.chain.steps):
            state = self.model(shifted(tokens, 1 + step), state, mixer)
            states.append(state)
        return states

    @torch.no_grad()
    def _read_target(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        return self.target(tokens, self.mixer, self.model.capture)

    def batch_loss(self, batch: TrainingBatch, rng: np.random.Generator) -> Tensor:
        hidden, features = self._read_target(batch.tokens)
        with torch.no_grad():
            target_probs = F.linear(hidden, self.head_rows).float().softmax(-1)
        known, width = self.known[batch.tokens], batch.tokens.shape[1]
        losses = torch.zeros((), device=self.device)
        weights = torch.zeros((), device=self.device)
        for step, state in enumerate(self.unroll(batch.tokens, hidden, features)[: width - 2]):
            # Chain i guesses token i + 2 + step, from what the target says at i + 1 + step.
            state, ahead = state[:, : width - 1 - step], slice(1 + step, width)
            counted = (batch.continues(2 + step) & shifted(known, 2 + step))[:, : state.shape[1]]
            loss = self._divergence(state, target_probs[:, ahead], hidden[:, ahead])
            losses = losses + STEP_DISCOUNT**step * (loss * counted).sum()
            weights = weights + STEP_DISCOUNT**step * counted.sum()
        return losses / weights.clamp(min=torch.finfo(weights.dtype).tiny)

    def _divergence(self, state: Tensor, probs: Tensor, hidden: Tensor) -> Tensor:
        """Loss `[B, n]` of head states `[B, n, hidden]` against the target's distributions and hidden states."""
        log_probs = self.model.logits(state).float().log_softmax(-1)
        loss = -(probs * log_probs).sum(-1)
        if not self.chain.feature_weight:
            return loss
        distance = F.smooth_l1_loss(state.float(), hidden.float(), reduction="none")
        return loss + self.chain.feature_weight * distance.mean(-1)

    def leading(self, batch: TrainingBatch) -> Tensor:
        hits = []
        for step, state in enumerate(self.unroll(batch.tokens, *self._read_target(batch.tokens))):
            drafted = self.model.to_target(self.model.logits(state).argmax(-1))
            hits.append((drafted == shifted(batch.tokens, 2 + step)) & batch.continues(2 + step))
        found = leading_hits(torch.stack(hits, dim=-1))
        # Chain i drafts behind the last token at i + 1.
        return torch.cat([torch.zeros_like(found[:, :1]), found[:, :-1]], dim=1)
