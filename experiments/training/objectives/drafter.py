"""What all drafters share in training: text, batches, held-out figures and acceptance in the engine."""

from __future__ import annotations

import json
import shutil
import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from algorithms.runtime.models.config import DecoderConfig
from algorithms.runtime.models.folder import resolve_folder
from algorithms.runtime.models.loading import Target, load_target
from algorithms.runtime.models.tokenizer import TOKENIZER_FILE, Tokenizer
from experiments.app.plan import check_target_there
from experiments.training.acceptance import Tally, add_batch
from experiments.training.batches import ResponseSet, TrainingBatch
from experiments.training.features import FeatureScales
from experiments.training.loop import TrainSettings
from experiments.training.model_folder import CONFIG_FILE, WEIGHTS_FILE, export_weights
from experiments.training.objectives.base import Objective, TrainingConfig
from experiments.training.parallel import Replicas
from experiments.training.served import ServedEvaluation, summary
from experiments.training.text.source import TextSource
from specdec_kernels.checks import expect_at_least

SERVED = "served"
FEATURE_WEIGHT = "fc.weight"
"""The weight that reads captured features, in drafters that read any."""


@dataclass
class BatchSettings:
    """Tokens of a step, prompts and padding included, and of a step of the held-out figures."""

    tokens: int = 4096
    evaluation_tokens: int = 2048

    def __post_init__(self) -> None:
        for key in ("tokens", "evaluation_tokens"):
            expect_at_least(f"batch.{key}", getattr(self, key), 1)


@dataclass
class DrafterTraining(TrainingConfig):
    """What all drafters accept. `start_from` is the folder or hub name of a drafter of the same shape, whose weights
    training starts from; None starts from scratch."""

    start_from: str | None = None
    batch: BatchSettings = field(default_factory=BatchSettings)
    train: TrainSettings = field(default_factory=lambda: TrainSettings(minutes=40.0))

    def build(self, replicas: Replicas) -> DrafterObjective:
        """Load the target, let it write, and build the drafter's objective; the target's tokenizer is copied."""
        target = self._target()
        setting = Setting(target, Tokenizer.load(target.path), self, replicas)
        if replicas.is_first:
            shutil.copyfile(target.path / TOKENIZER_FILE, Path(self.out_dir) / TOKENIZER_FILE)
        objective = self.objective(setting)
        if self.start_from is not None:
            objective.start_from(resolve_folder(self.start_from))
        return objective

    def write_text(self, replicas: Replicas) -> dict[str, Any]:
        text = TextSource(self._target(), self.text).training(Path(self.out_dir), replicas)
        return {"continuations": len(text), "text_tokens": text.num_answer_tokens}

    def _target(self) -> Target:
        check_target_there(self.model)
        target = load_target(self.model.path, self.train.device, self.train.frozen_dtype)
        target.model.requires_grad_(False)
        return target

    def objective(self, setting: Setting) -> DrafterObjective:
        """A fresh drafter and its objective."""
        raise NotImplementedError


class Setting:
    """What a drafter is trained with: the target, its tokenizer, the settings, and the text on the device."""

    def __init__(self, target: Target, tokenizer: Tokenizer, config: DrafterTraining, replicas: Replicas) -> None:
        self.target, self.tokenizer, self.config, self.device = target, tokenizer, config, config.train.device
        self.evaluation = ServedEvaluation(target, tokenizer, config.evaluation)
        source = TextSource(target, config.text)
        text, held_out = source.training(Path(config.out_dir), replicas), source.validation()
        source.close()
        self.num_answer_tokens = text.num_answer_tokens
        self.training = ResponseSet(text, self.device, config.batch.tokens)
        self.validation = {
            kind: ResponseSet(text, self.device, config.batch.evaluation_tokens) for kind, text in held_out.items()
        }


def draft_decoder(target: DecoderConfig, **changes: Any) -> DecoderConfig:
    """A decoder like `target`'s with plain full attention; `changes` replace further fields."""
    return replace(target, sliding_windows=(), soft_cap=None, scale=None, sinks=False, **changes)


class DrafterObjective(Objective):
    """A drafter, its loss on a batch, and what it would draft for known text."""

    draft_len: int
    """Length of the drafts that held-out tokens per step are simulated for."""
    added_parts: tuple[str, ...] = ()
    """Beginnings of the names of weights that a drafter may be given later."""
    scales = FeatureScales(())
    """What captured features are divided by while the drafter trains, if it reads any."""

    def __init__(self, drafter: nn.Module, setting: Setting) -> None:
        self.model, self.setting, self.config, self.device = drafter, setting, setting.config, setting.device
        self.training, self.validation = setting.training, setting.validation
        self._served_at = time.monotonic()

    def weights(self) -> dict[str, Tensor]:
        weights = dict(self.model.state_dict())
        return {name: self.scales.folded(w) if name == FEATURE_WEIGHT else w for name, w in weights.items()}

    def start_from(self, folder: Path) -> None:
        """Take the weights of the drafter in `folder`, the inverse of `weights`; `added_parts` may be missing there.

        Raises ValueError where it has another shape, reads other layers of the target, or lacks another weight.
        """
        ours, theirs = self.hf_config(), json.loads((folder / CONFIG_FILE).read_text())
        differing = [f"{key} {ours[key]}, got {theirs[key]}" for key in ours if theirs.get(key, ours[key]) != ours[key]]
        if differing:
            raise ValueError(f"start_from={folder}: expected {'; '.join(differing)}")
        weights = load_file(folder / WEIGHTS_FILE)
        taken = {name: self.scales.unfolded(w) if name == FEATURE_WEIGHT else w for name, w in weights.items()}
        fresh = {
            name: weight
            for name, weight in self.model.state_dict().items()
            if name not in taken and name.startswith(self.added_parts)
        }
        try:
            self.model.load_state_dict({**fresh, **taken})
        except RuntimeError as error:
            raise ValueError(f"start_from={folder}: {error}") from error

    @abstractmethod
    def methods(self) -> dict[str, Any]:
        """Label to configuration of the algorithms that the drafter is judged by, the first one during training too."""

    @abstractmethod
    def batch_loss(self, batch: TrainingBatch, rng: np.random.Generator) -> Tensor:
        """Mean loss; what is random in it comes from `rng`."""

    @abstractmethod
    def leading(self, batch: TrainingBatch) -> Tensor:
        """`[B, T]` int64: how many tokens of the draft behind each position the target accepts."""

    def loss(self, number: int) -> tuple[Tensor, int]:
        seed = self.config.train.seed
        batch = self.training.batch(seed, number)
        return self.batch_loss(batch, np.random.default_rng([seed, number])), batch.num_tokens

    def held_out(self) -> Mapping[str, float]:
        """Loss and simulated tokens per step on held-out text of each kind; now and then, tokens per step served."""
        figures = {}
        for kind, responses in self.validation.items():
            rng = np.random.default_rng(0)
            losses = [self.batch_loss(batch, rng) for batch in responses.in_order()]
            figures[f"heldout_{kind}"] = float(torch.stack(losses).mean())
            figures[f"tokens_per_step_{kind}"] = self.tally(responses).tokens_per_step
        every = self.config.evaluation.every_minutes
        if every is not None and time.monotonic() - self._served_at >= 60 * every:
            figures |= self._served_now()
            self._served_at = time.monotonic()
        return figures

    def score(self, figures: Mapping[str, float]) -> float | None:
        """The negative mean of simulated tokens per step: what drafters are for."""
        found = [value for key, value in figures.items() if key.startswith("tokens_per_step_")]
        return -sum(found) / len(found) if found else None

    def _served_now(self) -> dict[str, float]:
        """Tokens per step in the engine, by the weights of this moment."""
        folder = Path(self.config.out_dir) / SERVED
        folder.mkdir(exist_ok=True)
        export_weights(self.weights(), self.hf_config(), folder)
        label, algo = next(iter(self.methods().items()))
        with torch.autocast(self.device.split(":")[0], enabled=False):
            measured = self.setting.evaluation.measure(algo, folder, label)
        return {f"served_{name}": figures["tokens_per_step"] for name, figures in measured.items()}

    @torch.no_grad()
    def tally(self, responses: ResponseSet) -> Tally:
        """Decoding steps over known text, simulated."""
        tally = Tally(self.draft_len)
        for batch in responses.in_order():
            add_batch(tally, self.leading(batch), batch.starts, batch.lengths)
        return tally

    def measure(self, folder: Path) -> dict[str, Any]:
        evaluation = self.setting.evaluation
        measured = {label: evaluation.measure(algo, folder, label) for label, algo in self.methods().items()}
        return {**summary(measured), "text_tokens": self.setting.num_answer_tokens}
