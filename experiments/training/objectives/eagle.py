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
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from tokenizers import Tokenizer
from torch import Tensor

from algorithms.runtime.models.config import DecoderConfig, EagleConfig
from algorithms.runtime.models.decoder import Decoder, MixerWeights
from algorithms.runtime.models.dense_mixer import DenseMixer, head_norm
from algorithms.runtime.models.drafters.eagle import Eagle3Drafter, EagleDrafter
from algorithms.runtime.models.loading import Target
from algorithms.runtime.models.rope import apply_rope, rope_table
from experiments.training.acceptance import leading_hits
from experiments.training.batches import TrainingBatch, shifted
from experiments.training.objectives.drafter import DrafterObjective, DrafterTraining, draft_decoder
from experiments.training.responses import ResponseSource

STEP_DISCOUNT = 0.8


@dataclass
class ChainSettings:
    """`steps` drafts are unrolled; `feature_weight` is c of the loss."""

    steps: int = 6
    feature_weight: float = 0.0


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

    def objective(self, target: Target, tokenizer: Tokenizer, source: ResponseSource) -> ChainObjective:
        drafter = EagleDrafter(EagleConfig(head_config(self.drafter, target.config)))
        drafter.bind(target.model)
        drafter.reset_parameters()
        drafter.to(self.train.device)
        return ChainObjective("EAGLE head", target.model, drafter, source, self, self.chain)


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
    """Unrolled training of an EAGLE or EAGLE-3 head bound to `target`."""

    model: EagleDrafter | Eagle3Drafter

    def __init__(
        self,
        title: str,
        target: Decoder,
        drafter: EagleDrafter | Eagle3Drafter,
        source: ResponseSource,
        config: DrafterTraining,
        chain: ChainSettings,
    ) -> None:
        super().__init__(drafter, source, config)
        self.title, self.target, self.chain = title, target, chain
        self.draft_lens = tuple(sorted({min(3, chain.steps), chain.steps}))
        length = target.config.max_position_embeddings
        self.mixer = DenseMixer(target.config, length, self.device)
        self.table = rope_table(drafter.config.decoder, length + chain.steps, self.device)
        self.vocabulary = drafter.to_target(torch.arange(drafter.draft_vocab_size, device=self.device))
        self.scales = self._feature_scales()

    @torch.no_grad()
    def _feature_scales(self) -> list[float]:
        """Root mean squares of the captured features; training divides the features by them.

        The residual stream of a deep layer is tens of times larger than what a fresh layer adds to it.
        """
        arithmetic = self.training["arithmetic"]
        batch = arithmetic.rows(np.arange(min(16, len(arithmetic))))
        return [float(feature.square().mean().sqrt()) for feature in self._read_target(batch.tokens)[1]]

    def finish(self) -> None:
        """Divide the weights instead of the features."""
        width = self.target.config.hidden_size
        with torch.no_grad():
            for index, scale in enumerate(self.scales):
                self.model.fc.weight[:, index * width : (index + 1) * width] /= scale
        self.scales = [1.0] * len(self.scales)

    def hf_config(self) -> dict[str, Any]:
        return self.model.config.to_hf()

    def unroll(self, tokens: Tensor, hidden: Tensor, features: list[Tensor]) -> list[Tensor]:
        """What each step returns, `[B, T, hidden]`, for the target's final `hidden` and captured `features`."""
        state = self.model.fuse([f / s for f, s in zip(features, self.scales, strict=True)], hidden)
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
            target_probs = self.target.logits(hidden)[..., self.vocabulary].float().softmax(-1)
            known = torch.isin(batch.tokens, self.vocabulary)
        losses = hidden.new_zeros(())
        weights = hidden.new_zeros(())
        for step, state in enumerate(self.unroll(batch.tokens, hidden, features)):
            counted = (batch.continues(2 + step) & shifted(known, 2 + step)) * STEP_DISCOUNT**step
            log_probs = self.model.logits(state).float().log_softmax(-1)
            loss = -(shifted(target_probs, 1 + step) * log_probs).sum(-1)
            if self.chain.feature_weight:
                distance = F.smooth_l1_loss(state.float(), shifted(hidden, 1 + step).float(), reduction="none")
                loss = loss + self.chain.feature_weight * distance.mean(-1)
            losses = losses + (loss * counted).sum()
            weights = weights + counted.sum()
        return losses / weights.clamp(min=1)

    def leading(self, batch: TrainingBatch) -> Tensor:
        hits = []
        for step, state in enumerate(self.unroll(batch.tokens, *self._read_target(batch.tokens))):
            drafted = self.model.to_target(self.model.logits(state).argmax(-1))
            hits.append((drafted == shifted(batch.tokens, 2 + step)) & batch.continues(2 + step))
        found = leading_hits(torch.stack(hits, dim=-1))
        # Chain i drafts behind the last token at i + 1.
        return torch.cat([torch.zeros_like(found[:, :1]), found[:, :-1]], dim=1)
