"""What can be trained: the schema of each option of `drafter`."""

from experiments.training.objectives.dflash import DFlashTraining
from experiments.training.objectives.draft import DraftTraining
from experiments.training.objectives.eagle import EagleTraining
from experiments.training.objectives.eagle3 import Eagle3Training
from experiments.training.objectives.target import TargetTraining

SCHEMAS = {
    "dflash": DFlashTraining,
    "draft": DraftTraining,
    "eagle": EagleTraining,
    "eagle3": Eagle3Training,
    "target": TargetTraining,
}

__all__ = ["SCHEMAS", "DFlashTraining", "DraftTraining", "Eagle3Training", "EagleTraining", "TargetTraining"]
