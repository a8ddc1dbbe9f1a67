"""The schema of each option of `drafter`."""

from experiments.training.objectives.dflash import DFlash2Training, DFlashTraining, DominoTraining, DSparkTraining
from experiments.training.objectives.draft import DraftTraining
from experiments.training.objectives.eagle import Eagle3Training, EagleTraining, MTPTraining, PEagleTraining
from experiments.training.objectives.target import TargetTraining

SCHEMAS = {
    "dflash": DFlashTraining,
    "dflash2": DFlash2Training,
    "domino": DominoTraining,
    "draft": DraftTraining,
    "dspark": DSparkTraining,
    "eagle": EagleTraining,
    "eagle3": Eagle3Training,
    "mtp": MTPTraining,
    "peagle": PEagleTraining,
    "target": TargetTraining,
}

__all__ = ["SCHEMAS"]
