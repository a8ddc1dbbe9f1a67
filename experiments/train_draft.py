"""Trains the tiny target's standalone draft model: a small Qwen3 decoder that imitates what the target writes.

    python -m experiments.train_draft target=assets/tiny/target train.max_minutes=40 out_dir=outputs/train_draft

The draft has at most a sixth of the target's parameters, learns the target's next-token laws (KL divergence) and its
tokens (cross entropy), and is a language model of its own: its folder loads like the target's. Runs on a CPU or a GPU
and resumes.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

from hydra.core.config_store import ConfigStore
from tokenizers import Tokenizer

from algorithms.runtime.models.config import DecoderConfig
from algorithms.runtime.models.decoder import Decoder
from algorithms.runtime.models.loading import Target
from experiments.training.distill import DistillObjective, DistillSettings
from experiments.training.drafting import DrafterRunConfig
from experiments.training.program import command_line
from experiments.training.responses import ResponseSource

COMPANIONS = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")
LARGEST_SHARE = 1 / 6


@dataclass
class DraftSettings:
    """Shape of the draft; vocabulary, positions and head size are the target's."""

    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 4
    num_heads: int = 2
    num_kv_heads: int = 1


@dataclass
class TrainDraftConfig(DrafterRunConfig):
    """Schema of `configs/train_draft.yaml`."""

    out_dir: str = "outputs/train_draft"
    drafter: DraftSettings = field(default_factory=DraftSettings)
    distill: DistillSettings = field(default_factory=DistillSettings)


ConfigStore.instance().store(name="train_draft_schema", node=TrainDraftConfig)


def draft_config(settings: DraftSettings, target: DecoderConfig) -> DecoderConfig:
    """The small decoder of `settings` that reads and writes the target's tokens."""
    return replace(
        target,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_layers=settings.num_layers,
        num_heads=settings.num_heads,
        num_kv_heads=settings.num_kv_heads,
        tie_word_embeddings=True,
    )


def build(config: TrainDraftConfig, target: Target, tokenizer: Tokenizer, source: ResponseSource) -> DistillObjective:
    """A fresh draft and its objective; ValueError where the draft is too large to be worth drafting with."""
    draft = Decoder(draft_config(config.drafter, target.config))
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in (draft, target.model)]
    if sizes[0] > LARGEST_SHARE * sizes[1]:
        raise ValueError(f"drafter: expected at most a sixth of the target's {sizes[1]:,} parameters, got {sizes[0]:,}")
    draft.reset_parameters()
    draft.to(config.train.device)
    for name in COMPANIONS:
        if (target.path / name).is_file():
            shutil.copyfile(target.path / name, Path(config.out_dir) / name)
    return DistillObjective(target.model, draft, source, config, config.distill)


def main() -> None:
    """Command line entry."""
    command_line("train_draft", build)


if __name__ == "__main__":
    main()
