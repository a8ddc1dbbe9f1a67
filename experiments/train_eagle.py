"""Trains the tiny target's EAGLE head on what the target itself writes.

    python -m experiments.train_eagle target=assets/tiny/target train.max_minutes=40 out_dir=outputs/train_eagle

The head regresses the target's next final hidden state and, through the target's LM head, its next-token law. A few
drafts are unrolled over the head's own features, so that errors it will meet when drafting are met in training. Runs on
a CPU or a GPU and resumes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hydra.core.config_store import ConfigStore
from tokenizers import Tokenizer

from algorithms.runtime.models.config import DecoderConfig
from algorithms.runtime.models.config.eagle import EagleConfig
from algorithms.runtime.models.drafters.eagle import EagleDrafter
from algorithms.runtime.models.loading import Target
from experiments.training.chain import ChainObjective, ChainSettings
from experiments.training.drafting import DrafterRunConfig
from experiments.training.program import command_line
from experiments.training.responses import ResponseSource


@dataclass
class HeadSettings:
    """Width of the head's MLP; None takes the target's, as the rest is."""

    intermediate_size: int | None = None


@dataclass
class TrainEagleConfig(DrafterRunConfig):
    """Schema of `configs/train_eagle.yaml`."""

    out_dir: str = "outputs/train_eagle"
    drafter: HeadSettings = field(default_factory=HeadSettings)
    chain: ChainSettings = field(default_factory=lambda: ChainSettings(steps=6, feature_weight=0.5))


ConfigStore.instance().store(name="train_eagle_schema", node=TrainEagleConfig)


def head_config(settings: HeadSettings, target: DecoderConfig) -> DecoderConfig:
    """One Llama layer of the target's size, as the published heads are."""
    return replace(
        target,
        architecture="llama",
        qk_norm=False,
        num_layers=1,
        intermediate_size=settings.intermediate_size or target.intermediate_size,
        tie_word_embeddings=False,
    )


class EagleObjective(ChainObjective):
    """Features and laws, unrolled."""

    title = "EAGLE head"


def build(config: TrainEagleConfig, target: Target, tokenizer: Tokenizer, source: ResponseSource) -> EagleObjective:
    """A fresh head and its objective."""
    drafter = EagleDrafter(EagleConfig(head_config(config.drafter, target.config)))
    drafter.bind(target.model)
    drafter.reset_parameters()
    drafter.to(config.train.device)
    return EagleObjective(target.model, drafter, source, config, config.chain)


def main() -> None:
    """Command line entry."""
    command_line("train_eagle", build)


if __name__ == "__main__":
    main()
