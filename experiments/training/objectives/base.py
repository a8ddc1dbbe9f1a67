"""The interface of a trained model to the training loop and the export."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING
from torch import Tensor

from experiments.app.schema import ModelConfig, PathsConfig, SweepConfig
from experiments.training.loop import TrainSettings
from experiments.training.parallel import Replicas
from experiments.training.served import EvaluationSettings
from experiments.training.text.prompt_sources import TextSettings


class Objective(ABC):
    """A model with its loss and its held-out figures."""

    title: str
    model: Any  # a module whose `config` has `to_hf`

    @abstractmethod
    def loss(self, number: int, progress: float) -> tuple[Tensor, int]:
        """Loss of batch `number` after a share `progress` of the run, and its tokens; a pure function of these, the
        weights and the seed."""

    @abstractmethod
    def held_out(self) -> Mapping[str, float]:
        """Figures on held-out text."""

    def score(self, figures: Mapping[str, float]) -> float | None:
        """The figure that the best model minimises; None keeps the last model."""
        return None

    def hf_config(self) -> dict[str, Any]:
        """The `config.json` of the trained model."""
        found: dict[str, Any] = self.model.config.to_hf()
        return found

    def weights(self) -> dict[str, Tensor]:
        """Name to tensor of the exported folder."""
        return self.model.state_dict()

    @abstractmethod
    def measure(self, folder: Path) -> dict[str, Any]:
        """Figures of the exported model in `folder`, for the summary."""


@dataclass
class TrainingConfig:
    """Settings of every objective. Only drafters use the target and its text."""

    out_dir: str = "outputs/train"
    resume: bool = True
    model: ModelConfig = MISSING
    text: TextSettings = field(default_factory=TextSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    paths: PathsConfig = field(default_factory=PathsConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)

    def build(self, replicas: Replicas) -> Objective:
        """A fresh model and its objective; other files than the weights are written to `out_dir`."""
        raise NotImplementedError
