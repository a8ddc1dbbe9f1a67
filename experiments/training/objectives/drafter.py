"""The shared part of training a drafter: text, batches, held-out figures and acceptance in the engine."""

from __future__ import annotations

import json
import shutil
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from algorithms.checked import Between, Checked
from algorithms.models.config import DecoderConfig
from algorithms.models.folder import resolve_folder
from algorithms.models.loading import Target, load_target
from algorithms.models.tokenizer import TOKENIZER_FILE, Tokenizer
from experiments.app.plan import check_target_there
from experiments.report.tables import flatten
from experiments.training.batches import ResponseSet, TrainingBatch
from experiments.training.export import CONFIG_FILE, WEIGHTS_FILE
from experiments.training.loop import Objective, TrainSettings
from experiments.training.objectives.base import TrainingConfig
from experiments.training.parallel import Replicas
from experiments.training.served import ServedEvaluation
from experiments.training.text.source import TextSource

FEATURE_WEIGHT, MASK_FEATURE = "fc.weight", "mask_hidden"
"""The weight that reads captured features, in drafters that read any, and a trained one."""
SMALLEST_SHARE = 0.1  # the smallest scale of a channel, as a share of its layer's median


@dataclass
class BatchSettings(Checked):
    """Tokens of a step, prompts and padding included, and of a step of the held-out figures."""

    GROUP = "batch."
    tokens: Annotated[int, Between(1)] = 4096
    evaluation_tokens: Annotated[int, Between(1)] = 2048


@dataclass
class DrafterTraining(TrainingConfig):
    """Settings of all drafters. `start_from` is the folder or hub name of a drafter of the same shape, whose weights
    training starts from; None starts from scratch."""

    start_from: str | None = None
    batch: BatchSettings = field(default_factory=BatchSettings)
    train: TrainSettings = field(default_factory=lambda: TrainSettings(minutes=40.0))

    def build(self, replicas: Replicas) -> DrafterObjective:
        """Load the target, have it write, and build the drafter's objective; the target's tokenizer is copied."""
        check_target_there(self.model)
        dtype = torch.bfloat16 if self.train.autocast and self.train.on_gpu else torch.float32
        target = load_target(self.model.path, self.train.device, dtype)
        target.model.requires_grad_(False)
        setting = Setting(target, Tokenizer.load(target.path), self, replicas)
        if replicas.is_first:
            shutil.copyfile(target.path / TOKENIZER_FILE, Path(self.out_dir) / TOKENIZER_FILE)
        objective = self.objective(setting)
        if self.start_from is not None:
            objective.start_from(resolve_folder(self.start_from))
        return objective

    def objective(self, setting: Setting) -> DrafterObjective:
        """A fresh drafter and its objective."""
        raise NotImplementedError


class Setting:
    """The target, its tokenizer, the settings, and the text on the device."""

    def __init__(self, target: Target, tokenizer: Tokenizer, config: DrafterTraining, replicas: Replicas) -> None:
        self.target, self.tokenizer, self.config, self.device = target, tokenizer, config, config.train.device
        self.evaluation = ServedEvaluation(target, tokenizer, config.evaluation)
        source = TextSource(target, config.text)
        text, held_out = source.training(Path(config.out_dir), replicas), source.validation()
        source.close()
        if not config.evaluation.sets:
            for kind, prompts in held_out.items():
                self.evaluation.ask(kind, prompts.prompts)
        self.num_answer_tokens = text.num_answer_tokens
        self.training = ResponseSet(text, self.device, config.batch.tokens)
        self.validation = {
            kind: ResponseSet(text, self.device, config.batch.evaluation_tokens) for kind, text in held_out.items()
        }


def draft_decoder(target: DecoderConfig, **changes: Any) -> DecoderConfig:
    """A decoder like `target`'s with plain full attention; `changes` replace further fields. For a target with other
    kinds of layers it is Llama's."""
    if target.mixings or target.mlps:
        plain: dict[str, Any] = dict(interleaved_rope=False, gated_attention=False, rotary_share=1.0, qk_norm=False)
        plain |= dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), False)
        target = replace(target, architecture="llama", mixings=(), mlps=(), **plain)
    return replace(target, sliding_windows=(), mixings=(), mlps=(), soft_cap=None, scale=None, sinks=False, **changes)


def leading_hits(hits: Tensor) -> Tensor:
    """How many entries before the first False of `hits [..., K]`: `[...]` int64."""
    return hits.long().cumprod(-1).sum(-1)


def num_steps(leading: Sequence[int], start: int, length: int, draft_len: int) -> int:
    """Decoding steps of a continuation at `start` … `length` - 1, with `leading[r]` right drafts after position r.
    Greedy output does not depend on the drafts, so decoding visits r = start - 1, r + accepted(r) + 1, and so on."""
    last, steps = start - 1, 0
    while last < length - 1:
        last, steps = last + min(leading[last], draft_len) + 1, steps + 1
    return steps


class DrafterObjective(Objective):
    """A drafter, its loss on a batch, and its drafts for known text."""

    added_parts: tuple[str, ...] = ()  # parts of the names of weights that a drafter may be given later
    scales: Tensor | None = None
    """Divisors `[layers, width]` of the captured features while the drafter trains, if it reads any."""

    def __init__(self, drafter: nn.Module, setting: Setting, draft_len: int) -> None:
        """`draft_len` is that of the simulated tokens per step."""
        self.model, self.setting, self.config, self.device = drafter, setting, setting.config, setting.device
        self.training, self.validation, self.draft_len = setting.training, setting.validation, draft_len
        self.target = setting.target.model
        self.length = self.target.config.max_position_embeddings

    def read_target(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The target's final hidden states, and the features that the drafter reads, `[B, T, hidden]` each."""
        raise NotImplementedError

    def channel_scales(self) -> Tensor | None:
        """Root mean squares `[layers, width]` float32 of the channels of the features, over a sample of the text; None
        where the drafter reads no features.

        The residual stream of a deep layer is much larger than a fresh layer's output, and its channels differ by
        orders of magnitude. Training divides each channel by its scale; the exported weights are divided instead. First
        positions are left out: decoders keep a huge, meaningless state there.
        """
        batch = self.training.sample()
        features = self.read_target(batch.tokens)[1]
        if not features:
            return None
        counted = batch.within
        counted[:, 0] = False
        means = torch.stack([feature.float()[counted].square().mean(0).sqrt() for feature in features])
        return means.maximum(SMALLEST_SHARE * means.median(-1, keepdim=True).values + 1e-6)

    def weights(self) -> dict[str, Tensor]:
        return self._rescaled(self.model.state_dict(), -1)

    def _rescaled(self, weights: Mapping[str, Tensor], power: int) -> dict[str, Tensor]:
        """`weights` for features times the scales to this power."""
        if self.scales is None:
            return dict(weights)
        factors = self.scales.flatten() ** power
        parts = {FEATURE_WEIGHT: factors, MASK_FEATURE: 1 / factors}
        return {name: w.to(factors) * parts[name] if name in parts else w for name, w in weights.items()}

    def scaled(self, features: Sequence[Tensor]) -> list[Tensor]:
        """The captured features `[..., width]`, divided by their scales."""
        if self.scales is None:
            return list(features)
        return [feature / scale.to(feature.dtype) for feature, scale in zip(features, self.scales, strict=True)]

    def start_from(self, folder: Path) -> None:
        """Take the weights of the drafter in `folder`, the inverse of `weights`; `added_parts` may be missing there.
        Raises ValueError where it has another shape, reads other layers of the target, or lacks another weight."""
        ours, theirs = flatten(self.hf_config()), flatten(json.loads((folder / CONFIG_FILE).read_text()))
        differing = [f"{key} {ours[key]}, got {theirs[key]}" for key in ours if theirs.get(key, ours[key]) != ours[key]]
        if differing:
            raise ValueError(f"start_from={folder}: expected {'; '.join(differing)}")
        weights = self._rescaled(load_file(folder / WEIGHTS_FILE), 1)
        own = self.model.state_dict().items()
        fresh = {name: weight for name, weight in own if any(part in name for part in self.added_parts)}
        try:
            self.model.load_state_dict({**fresh, **weights})
        except RuntimeError as error:
            raise ValueError(f"start_from={folder}: {error}") from error

    @abstractmethod
    def methods(self) -> dict[str, Any]:
        """Label to configuration of the algorithms of the evaluation."""

    @abstractmethod
    def batch_loss(self, batch: TrainingBatch, rng: np.random.Generator, progress: float = 1.0) -> Tensor:
        """Mean loss after a share `progress` of the run; `rng` is its only source of randomness."""

    @abstractmethod
    def leading(self, batch: TrainingBatch) -> Tensor:
        """`[B, T]` int64: accepted drafts after each position."""

    def loss(self, number: int, progress: float) -> tuple[Tensor, int]:
        seed = self.config.train.seed
        batch = self.training.batch(seed, number)
        return self.batch_loss(batch, np.random.default_rng([seed, number]), progress), batch.num_tokens

    def held_out(self) -> Mapping[str, float]:
        """Loss and simulated tokens per step on held-out text of each kind."""
        figures = {}
        for kind, responses in self.validation.items():
            rng = np.random.default_rng(0)
            losses = [self.batch_loss(batch, rng) for batch in responses.in_order()]
            figures[f"heldout_{kind}"] = float(torch.stack(losses).mean())
            figures[f"tokens_per_step_{kind}"] = self.tokens_per_step(responses)
        return figures

    def score(self, figures: Mapping[str, float]) -> float | None:
        """The negative mean of simulated tokens per step."""
        found = [value for key, value in figures.items() if key.startswith("tokens_per_step_")]
        return -sum(found) / len(found) if found else None

    @torch.no_grad()
    def tokens_per_step(self, responses: ResponseSet) -> float:
        """Tokens per step of decoding known text, simulated."""
        tokens = steps = 0
        for batch in responses.in_order():
            table = torch.cat([batch.starts[:, None], batch.lengths[:, None], self.leading(batch)], dim=1)
            steps += sum(num_steps(right, start, length, self.draft_len) for start, length, *right in table.tolist())
            tokens += batch.num_tokens
        return tokens / steps

    def measure(self, folder: Path) -> dict[str, Any]:
        measured = self.setting.evaluation.measure(self.methods(), folder)
        return {**measured, "text_tokens": self.setting.num_answer_tokens}
