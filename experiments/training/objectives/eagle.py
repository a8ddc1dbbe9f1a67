"""EAGLE, EAGLE-3, P-EAGLE and MTP heads, trained unrolled: every position of a row drafts a chain, all at once.

Chain i begins with the pair (x_{i+1}, f_i). In step k (0, 1, …) its input is token x_{i+1+k} with the feature that step
k - 1 returned, at rotary position i + k. It attends to the first-step keys of chains j <= i, which represent the text,
and to the keys of its own earlier steps, which represent its drafts. So step k sees the same as the k-th draft of a
decoding step after the last token x_{i+1}, if the drafts before it were accepted (training-time test of EAGLE-3,
arXiv 2503.01840).

With p the target's distribution of x_{i+2+k} over the draft vocabulary and q the head's,
    loss = sum_k 0.8^k [ -sum_v p(v) log q(v) + c smoothL1(h_{i+1+k}, f_{i+1+k}) ] / sum_k 0.8^k
where c > 0 for EAGLE only: its head returns features, while the states of EAGLE-3 are free. An EAGLE-3 head drafts the
tokens that occur most. An MTP head is a layer of the target's own kind; its file is one of speculators.

P-EAGLE drafts all steps in one pass: from step 1 on the input is a mask token with a trained feature, and the embedding
is trained too (vllm-project/speculators). There depth k keeps a random share r^k of its rows, to save memory; here it
keeps all with the weight 0.8^k, which is the mean of that for r = 0.8.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from algorithms.checked import Between, Checked
from algorithms.drafting.level_drafter import RAW
from algorithms.eagle.config import NUM_FEATURES, Eagle3Config, EagleConfig, default_aux_layer_ids
from algorithms.eagle.drafting import Eagle, Eagle3, PEagle
from algorithms.eagle.model import Eagle3Drafter, EagleDrafter
from algorithms.models.config import DecoderConfig
from algorithms.models.dense_mixer import DenseMixer
from algorithms.models.layers import MixerWeights, apply_rope, head_norm, rope_table
from algorithms.mtp.config import MTPConfig
from algorithms.mtp.drafting import MTP
from algorithms.mtp.model import MTPHead
from experiments.training.batches import TrainingBatch, shifted
from experiments.training.objectives import drafter as base
from experiments.training.objectives.dflash import mask_token

STEP_DISCOUNT = 0.8
PUBLISHED_VOCABULARY = 32_000
SMALLEST_PUBLISHED_TARGET = 7  # layers from which on the published rule names three different ones


@dataclass
class ChainSettings(Checked):
    """`steps` drafts are unrolled; `feature_weight` is c of the loss."""

    GROUP = "chain."
    steps: Annotated[int, Between(1)] = 6
    feature_weight: Annotated[float, Between(0)] = 0.0


@dataclass
class HeadSettings(Checked):
    """Width of the head's MLP; None takes the target's, as for the rest of the shape."""

    GROUP = "drafter."
    intermediate_size: int | None = None


@dataclass
class EagleTraining(base.DrafterTraining):
    drafter: HeadSettings = field(default_factory=HeadSettings)
    chain: ChainSettings = field(default_factory=lambda: ChainSettings(steps=6, feature_weight=0.5))

    def objective(self, setting: base.Setting) -> ChainObjective:
        drafter = EagleDrafter(EagleConfig(head_config(self.drafter, setting.target.config)))
        drafter.bind(setting.target.model)
        drafter.reset_parameters()
        return ChainObjective("EAGLE head", drafter.to(self.train.device), setting, self.chain, Eagle.Config)


@dataclass
class Eagle3Settings(HeadSettings):
    """Shape of the head. None takes what the published heads have: 32,000 draft tokens, or a quarter of a vocabulary
    that is not much larger; and features of a low, a middle and a high layer of the target."""

    draft_vocab_size: Annotated[int | None, Between(1)] = None
    target_layer_ids: list[int] | None = None


@dataclass
class Eagle3Training(base.DrafterTraining):
    drafter: Eagle3Settings = field(default_factory=Eagle3Settings)
    chain: ChainSettings = field(default_factory=ChainSettings)

    def objective(self, setting: base.Setting) -> ChainObjective:
        return ChainObjective("EAGLE-3 head", self.head(setting), setting, self.chain, Eagle3.Config)

    def head(self, setting: base.Setting, num_layers: int = 1, mask: int | None = None) -> Eagle3Drafter:
        """A fresh head; `mask` is P-EAGLE's mask token."""
        target = setting.target.config
        size = PUBLISHED_VOCABULARY if target.vocab_size >= 3 * PUBLISHED_VOCABULARY else max(1, target.vocab_size // 4)
        shape = Eagle3Config(
            decoder=head_config(self.drafter, target, num_layers),
            draft_vocab_size=self.drafter.draft_vocab_size or size,
            target_hidden_size=target.hidden_size,
            aux_layer_ids=tuple(self.drafter.target_layer_ids or feature_layers(target.num_layers)),
            mask_token_id=mask,
        )
        own, values = mask is not None, shape.num_features * target.hidden_size
        drafter = Eagle3Drafter(shape, target.num_layers, own, mask_shape=(1, 1, values) if own else None)
        drafter.to(self.train.device)
        drafter.bind(setting.target.model)
        if shape.reduced:
            counts = setting.training.token_counts(target.vocab_size)
            most_frequent = np.sort(np.argsort(-counts, kind="stable")[: shape.draft_vocab_size])
            drafter.set_vocabulary(torch.from_numpy(most_frequent).to(self.train.device))
        drafter.reset_parameters()
        return drafter


@dataclass
class PEagleSettings(Eagle3Settings):
    """Also the layers, and the token of the rows that draft; None takes the one that `mask_token` finds."""

    num_layers: Annotated[int, Between(1)] = 4
    mask_token_id: int | None = None


@dataclass
class PEagleTraining(Eagle3Training):
    drafter: PEagleSettings = field(default_factory=PEagleSettings)
    chain: ChainSettings = field(default_factory=lambda: ChainSettings(steps=8))

    def objective(self, setting: base.Setting) -> OnePassObjective:
        mask = self.drafter.mask_token_id
        if mask is None:
            mask = mask_token(setting.tokenizer, setting.target.config.vocab_size)
        head = self.head(setting, self.drafter.num_layers, mask)
        assert head.embed_tokens is not None and head.mask_hidden is not None
        head.embed_tokens.load_state_dict(setting.target.model.model.embed_tokens.state_dict())
        # At zero, the norm of the feature would have a huge gradient.
        torch.nn.init.normal_(head.mask_hidden)
        return OnePassObjective("P-EAGLE head", head, setting, self.chain, PEagle.Config)


@dataclass
class MTPTraining(base.DrafterTraining):
    chain: ChainSettings = field(default_factory=lambda: ChainSettings(steps=3))

    def objective(self, setting: base.Setting) -> ChainObjective:
        target = setting.target.config
        head = MTPHead(MTPConfig(base.draft_decoder(target, num_layers=1), hidden_in=RAW), target.num_layers)
        head.bind(setting.target.model)
        head.to(self.train.device)
        head.reset_parameters()
        return ChainObjective("MTP head", head, setting, self.chain, MTP.Config)


def feature_layers(num_target_layers: int) -> tuple[int, ...]:
    """The published layers, or evenly spaced ones of a target too shallow for them."""
    if num_target_layers >= SMALLEST_PUBLISHED_TARGET:
        return default_aux_layer_ids(num_target_layers)
    return tuple(round(i * (num_target_layers - 1) / (NUM_FEATURES - 1)) for i in range(NUM_FEATURES))


def head_config(settings: HeadSettings, target: DecoderConfig, num_layers: int = 1) -> DecoderConfig:
    """Llama layers of the target's size, as the published heads have."""
    return base.draft_decoder(
        target,
        architecture="llama",
        qk_norm=False,
        qkv_bias=False,
        o_bias=False,
        num_layers=num_layers,
        intermediate_size=settings.intermediate_size or target.intermediate_size,
        tie_word_embeddings=False,
    )


class ChainMixer:
    """Attention of a head over rows `[B, T]`, unrolled; each call of a layer is the next step."""

    def __init__(self, config: DecoderConfig, table: Tensor) -> None:
        self.config, self.table = config, table
        self.cache: defaultdict[int, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, weights: MixerWeights) -> Tensor:
        keys, values = self.cache[layer]
        positions = torch.arange(q.shape[1], device=q.device) + len(keys)
        eps, interleaved = self.config.rms_norm_eps, self.config.interleaved_rope
        q = apply_rope(head_norm(q, weights.q_norm, eps), self.table, positions, interleaved)
        k = apply_rope(head_norm(k, weights.k_norm, eps), self.table, positions, interleaved)
        q, group = rearrange(q, "b t h d -> b h t d"), q.shape[2] // k.shape[2]
        keys.append(repeat(k, "b t h d -> b (h group) t d", group=group))
        values.append(repeat(v, "b t h d -> b (h group) t d", group=group))
        if len(keys) == 1:
            out = F.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
        else:
            out = self._over_text_and_chain(q * q.shape[-1] ** -0.5, keys, values)
        return rearrange(out, "b h t d -> b t h d")

    @staticmethod
    def _over_text_and_chain(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        length = q.shape[2]
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        text = (q @ rearrange(keys[0], "b h s d -> b h d s")).masked_fill(future, float("-inf"))
        own = [(q * key).sum(-1, keepdim=True) for key in keys[1:]]
        shares = torch.cat([text, *own], dim=-1).softmax(-1, dtype=torch.float32).to(q.dtype)
        out = shares[..., :length] @ values[0]
        for index, value in enumerate(values[1:]):
            out = out + shares[..., length + index, None] * value
        return out


class ChainObjective(base.DrafterObjective):
    """Unrolled training of a head bound to its target."""

    model: EagleDrafter | Eagle3Drafter | MTPHead

    def __init__(
        self,
        title: str,
        drafter: EagleDrafter | Eagle3Drafter | MTPHead,
        setting: base.Setting,
        chain: ChainSettings,
        algorithm: type[Eagle.Config] | type[MTP.Config],
    ) -> None:
        super().__init__(drafter, setting, chain.steps)
        self.title, self.chain, self._algorithm = title, chain, algorithm
        self.mixer = DenseMixer(self.target.config, self.length, self.device)
        self.table = rope_table(drafter.config.decoder, self.length + chain.steps, self.device)
        self._learn_vocabulary()
        # An MTP head norms the feature instead.
        if base.FEATURE_WEIGHT in drafter.state_dict():
            self.scales = self.channel_scales()

    def start_from(self, folder: Path) -> None:
        super().start_from(folder)
        self._learn_vocabulary()

    def _learn_vocabulary(self) -> None:
        """The tokens that the head drafts, and their rows of the target's LM head."""
        vocabulary = self.model.to_target(torch.arange(self.model.draft_vocab_size, device=self.device))
        self.known = torch.zeros(self.target.config.vocab_size, dtype=torch.bool, device=self.device)
        self.known[vocabulary] = True
        head = self.target.lm_head or self.target.model.embed_tokens
        self.head_rows = head.weight.detach()[vocabulary]  # [draft vocabulary, hidden]

    def methods(self) -> dict[str, Any]:
        """A chain and a tree as long as the unrolled ones, and the short chain that engines serve by default."""
        steps, children = self.chain.steps, min(10, self.model.draft_vocab_size)
        found = {f"chain_{length}": self._algorithm(steps=length) for length in dict.fromkeys((min(3, steps), steps))}
        return {**found, f"tree_{steps}_{children}_32": self._algorithm(steps=steps, topk=children, num_nodes=32)}

    def unroll(self, tokens: Tensor, hidden: Tensor, features: list[Tensor]) -> list[Tensor]:
        """States of each step, `[B, T, hidden]`, for the target's final `hidden` and captured `features`."""
        state = self.model.fuse(self.scaled(features), hidden)
        mixer, states = ChainMixer(self.model.config.decoder, self.table), []
        for step in range(self.chain.steps):
            state = self.model(*self.inputs(tokens, state, step), mixer)
            states.append(state)
        return states

    def inputs(self, tokens: Tensor, state: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Tokens `[B, T]` and features that a step reads, from the `state` that the step before returned."""
        return shifted(tokens, 1 + step), state

    @torch.no_grad()
    def read_target(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        return self.target(tokens, self.mixer, self.model.target_layers)

    def batch_loss(self, batch: TrainingBatch, rng: np.random.Generator, progress: float = 1.0) -> Tensor:
        hidden, features = self.read_target(batch.tokens)
        with torch.no_grad():
            target_probs = F.linear(hidden, self.head_rows).float().softmax(-1)
        known, width = self.known[batch.tokens], batch.tokens.shape[1]
        losses = torch.zeros((), device=self.device)
        weights = torch.zeros((), device=self.device)
        for step, state in enumerate(self.unroll(batch.tokens, hidden, features)[: width - 2]):
            # Chain i guesses token i + 2 + step, which the target predicts at i + 1 + step.
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
        for step, state in enumerate(self.unroll(batch.tokens, *self.read_target(batch.tokens))):
            drafted = self.model.to_target(self.model.logits(state).argmax(-1))
            hits.append((drafted == shifted(batch.tokens, 2 + step)) & batch.continues(2 + step))
        found = base.leading_hits(torch.stack(hits, dim=-1))
        # Chain i drafts after the last token at i + 1.
        return torch.cat([torch.zeros_like(found[:, :1]), found[:, :-1]], dim=1)


class OnePassObjective(ChainObjective):
    """Training of a P-EAGLE head, whose steps do not read each other."""

    model: Eagle3Drafter

    def inputs(self, tokens: Tensor, state: Tensor, step: int) -> tuple[Tensor, Tensor]:
        token = self.model.config.mask_token_id
        assert token is not None
        if step == 0:
            return shifted(tokens, 1), state
        return torch.full_like(tokens, token), self.model.mask_feature().to(state.dtype).expand_as(state)


SCHEMAS = {"eagle": EagleTraining, "eagle3": Eagle3Training, "mtp": MTPTraining, "peagle": PEagleTraining}
