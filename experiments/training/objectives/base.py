"""What the training loop and the export need of anything that is trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from experiments.training.loop import TrainSettings


class Objective(ABC):
    """A model with its loss and its held-out figures."""

    title: str
    model: nn.Module

    @abstractmethod
    def loss(self, step: int) -> tuple[Tensor, int]:
        """Loss of the step's batch, and its tokens; a pure function of the weights, the seed and `step`."""

    @abstractmethod
    def held_out(self) -> Mapping[str, float]:
        """Figures on held-out text."""

    @abstractmethod
    def hf_config(self) -> dict[str, Any]:
        """The `config.json` of the trained model."""

    @abstractmethod
    def measure(self) -> dict[str, Any]:
        """What the summary reports of the exported model, on the evaluation prompts."""

    def finish(self) -> None:
        """Remove what only training needs; called once, before rounding and export."""
        return


@dataclass
class TrainingConfig:
    """What every objective accepts."""

    out_dir: str = "outputs/train"
    resume: bool = True
    train: TrainSettings = field(default_factory=TrainSettings)

    def build(self) -> Objective:
        """A fresh model and its objective; the files beside the weights are written to `out_dir`."""
        raise NotImplementedError
