"""Settings of every training."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from experiments.app.schema import ModelConfig, PathsConfig, SweepConfig
from experiments.training.loop import Objective, TrainSettings
from experiments.training.parallel import Replicas
from experiments.training.served import EvaluationSettings
from experiments.training.text.prompt_sources import TextSettings


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
