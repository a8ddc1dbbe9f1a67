"""The schema of each option of `drafter`."""

from experiments.training.objectives.dflash import DFlashTraining, DSparkTraining
from experiments.training.objectives.draft import DraftTraining
from experiments.training.objectives.eagle import Eagle3Training, EagleTraining, PEagleTraining
from experiments.training.objectives.target import TargetTraining

SCHEMAS = {
    "dflash": DFlashTraining,
    "draft": DraftTraining,
    "dspark": DSparkTraining,
    "eagle": EagleTraining,
    "eagle3": Eagle3Training,
    "peagle": PEagleTraining,
    "target": TargetTraining,
}

__all__ = ["SCHEMAS"]
