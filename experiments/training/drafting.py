"""What the training programs of all drafters share: text, batches, held-out figures, the run and its export."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from algorithms.runtime.models.loading import Target, load_target
from experiments.training.acceptance import Tally, add_batch
from experiments.training.batches import ResponseSet, TrainingBatch
from experiments.training.curve import plot_curve
from experiments.training.export import export_weights, round_weights, write_json
from experiments.training.loop import Trainer, TrainSettings
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
class DrafterRunConfig:
    """What all programs that train a drafter accept."""

    target: str = "assets/tiny/target"
    out_dir: str = "outputs/train"
    resume: bool = True
    responses: ResponseSettings = field(default_factory=ResponseSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    train: TrainSettings = field(default_factory=lambda: TrainSettings(max_minutes=40.0))


class DrafterObjective(ABC):
    """A drafter, its loss on a batch, and what it would draft for known text."""

    title: str
    draft_lens: tuple[int, ...]
    """Draft lengths that tokens per step are reported for; progress is watched at the first."""

    def __init__(self, drafter: nn.Module, source: ResponseSource, config: DrafterRunConfig) -> None:
        self.drafter, self.config, self.device = drafter, config, config.train.device
        self.training = {kind: ResponseSet(source.training(kind), self.device) for kind in KINDS}
        self.validation = {kind: ResponseSet(source.validation(kind), self.device) for kind in KINDS}

    @abstractmethod
    def batch_loss(self, batch: TrainingBatch, rng: np.random.Generator) -> Tensor:
        """Mean loss; what is random in it comes from `rng`."""

    @abstractmethod
    def leading(self, batch: TrainingBatch) -> Tensor:
        """`[B, T]` int64: for a root at each position, how many of the longest draft's tokens the target accepts."""

    @abstractmethod
    def hf_config(self) -> dict[str, Any]:
        """The `config.json` of the trained drafter."""

    def finish(self) -> None:
        """Fold into the weights what only training needed; called once, before rounding and export."""
        return

    def loss(self, step: int) -> tuple[Tensor, int]:
        """Loss of the step's batch, and its tokens; a pure function of the weights, the seed and `step`."""
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


Build = Callable[[Target, Tokenizer, ResponseSource], DrafterObjective]


def run(config: DrafterRunConfig, build: Build) -> dict[str, Any]:
    """Write responses, train what `build` makes, export and measure; returns the summary."""
    folder, device = Path(config.out_dir), config.train.device
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(config.train.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(config.train.seed)
    target = load_target(config.target, device, torch.float32)
    target.model.requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(target.path / TOKENIZER_FILE))
    shutil.copyfile(target.path / TOKENIZER_FILE, folder / TOKENIZER_FILE)
    source = ResponseSource(target, tokenizer, config.responses)
    objective = build(target, tokenizer, source)
    trainer = Trainer(objective.drafter, config.train, folder, objective.loss, objective.held_out)
    if config.resume:
        trainer.resume()
    trainer.run()
    return _export(trainer, objective, source)


def _measured(objective: DrafterObjective, source: ResponseSource) -> dict[str, Any]:
    found: dict[str, Any] = {"tokens_per_step": {}, "acceptance_at": {}}
    for kind in KINDS:
        tallies = objective.tallies(ResponseSet(source.evaluation(kind), objective.device))
        found["tokens_per_step"][kind] = {f"draft_len_{t.draft_len}": round(t.tokens_per_step, 3) for t in tallies}
        longest = max(tallies, key=lambda tally: tally.draft_len)
        found["acceptance_at"][kind] = [round(share, 3) for share in longest.acceptance_at]
    return found


def _export(trainer: Trainer, objective: DrafterObjective, source: ResponseSource) -> dict[str, Any]:
    drafter, folder = objective.drafter, trainer.folder
    objective.finish()
    round_weights(drafter)
    drafter.eval()
    # The weights come first: a failed measurement must not cost them.
    export_weights(drafter, objective.hf_config(), folder)
    device = trainer.settings.device
    summary: dict[str, Any] = {
        **_measured(objective, source),
        "parameters": sum(parameter.numel() for parameter in drafter.parameters()),
        "steps": trainer.step,
        "tokens": trainer.tokens,
        "elapsed_s": round(trainer.elapsed_s, 1),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "threads": trainer.settings.threads,
        **{key: value for key, value in trainer.rows[-1].items() if key.startswith("heldout")},
    }
    write_json(folder / "training_summary.json", summary)
    plot_curve(trainer.rows, folder / "training.svg", f"{objective.title}: training and held-out loss")
    return summary
