"""What all drafters share in training: text, batches, held-out figures and acceptance on the evaluation prompts."""

from __future__ import annotations

import shutil
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from algorithms.runtime.models.config import DecoderConfig
from algorithms.runtime.models.loading import Target, load_target
from experiments.training.acceptance import Tally, add_batch
from experiments.training.batches import ResponseSet, TrainingBatch
from experiments.training.loop import TrainSettings
from experiments.training.objectives.base import Objective, TrainingConfig
from experiments.training.responses import KINDS, ResponseSettings, ResponseSource

TOKENIZER_FILE = "tokenizer.json"


@dataclass
class BatchSettings:
    """A step sees sequences of one kind: code with probability `code_share`, else arithmetic."""

    arithmetic_sequences: int = 16
    code_sequences: int = 8
    code_share: float = 0.5
    evaluation_sequences: int = 16


@dataclass
class DrafterTraining(TrainingConfig):
    """What all drafters accept."""

    target: str = "assets/tiny/target"
    responses: ResponseSettings = field(default_factory=ResponseSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    train: TrainSettings = field(default_factory=lambda: TrainSettings(max_minutes=40.0))

    def build(self) -> DrafterObjective:
        """Load the target, copy its tokenizer and build the drafter's objective."""
        target = load_target(self.target, self.train.device, torch.float32)
        target.model.requires_grad_(False)
        tokenizer = Tokenizer.from_file(str(target.path / TOKENIZER_FILE))
        shutil.copyfile(target.path / TOKENIZER_FILE, Path(self.out_dir) / TOKENIZER_FILE)
        return self.objective(target, tokenizer, ResponseSource(target, tokenizer, self.responses))

    def objective(self, target: Target, tokenizer: Tokenizer, source: ResponseSource) -> DrafterObjective:
        """A fresh drafter for `target` and its objective."""
        raise NotImplementedError


def draft_decoder(target: DecoderConfig, **changes: Any) -> DecoderConfig:
    """A decoder like `target`'s with plain full attention; `changes` replace further fields."""
    return replace(target, sliding_windows=(), soft_cap=None, scale=None, sinks=False, **changes)


class DrafterObjective(Objective):
    """A drafter, its loss on a batch, and what it would draft for known text."""

    draft_lens: tuple[int, ...]
    """Draft lengths that tokens per step are reported for; held-out figures are for the first."""

    def __init__(self, drafter: nn.Module, source: ResponseSource, config: DrafterTraining) -> None:
        self.model, self.source, self.config, self.device = drafter, source, config, config.train.device
        self.training = {kind: ResponseSet(source.training(kind), self.device) for kind in KINDS}
        self.validation = {kind: ResponseSet(source.validation(kind), self.device) for kind in KINDS}

    @abstractmethod
    def batch_loss(self, batch: TrainingBatch, rng: np.random.Generator) -> Tensor:
        """Mean loss; what is random in it comes from `rng`."""

    @abstractmethod
    def leading(self, batch: TrainingBatch) -> Tensor:
        """`[B, T]` int64: how many tokens of the longest draft behind each position the target accepts."""

    def loss(self, step: int) -> tuple[Tensor, int]:
        rng, settings = np.random.default_rng([self.config.train.seed, step]), self.config.batch
        if rng.random() < settings.code_share:
            batch = self.training["code"].draw(rng, settings.code_sequences)
        else:
            batch = self.training["arithmetic"].draw(rng, settings.arithmetic_sequences)
        return self.batch_loss(batch, rng), batch.num_tokens

    def held_out(self) -> Mapping[str, float]:
        """Loss and tokens per step on validation text of each kind."""
        figures = {}
        for kind, responses in self.validation.items():
            rng, size = np.random.default_rng(0), self.config.batch.evaluation_sequences
            losses = [self.batch_loss(batch, rng) for batch in responses.chunks(size)]
            figures[f"heldout_{kind}"] = float(torch.stack(losses).mean())
            figures[f"tokens_per_step_{kind}"] = self.tallies(responses)[0].tokens_per_step
        return figures

    @torch.no_grad()
    def tallies(self, responses: ResponseSet) -> list[Tally]:
        """One tally per draft length."""
        tallies = [Tally(draft_len) for draft_len in self.draft_lens]
        for batch in responses.chunks(self.config.batch.evaluation_sequences):
            leading = self.leading(batch)
            for tally in tallies:
                add_batch(tally, leading, batch.starts, batch.lengths)
        return tallies

    def measure(self) -> dict[str, Any]:
        found: dict[str, Any] = {"tokens_per_step": {}, "acceptance_at": {}}
        for kind in KINDS:
            tallies = self.tallies(ResponseSet(self.source.evaluation(kind), self.device))
            found["tokens_per_step"][kind] = {f"draft_len_{t.draft_len}": round(t.tokens_per_step, 3) for t in tallies}
            longest = max(tallies, key=lambda tally: tally.draft_len)
            found["acceptance_at"][kind] = [round(share, 3) for share in longest.acceptance_at]
        return found
