"""Trains the tiny target's EAGLE-3 head on what the target itself writes.

    python -m experiments.train_eagle3 target=assets/tiny/target train.max_minutes=40 out_dir=outputs/train_eagle3

Training-time test: several drafts are unrolled over the head's own states, each with the attention it will have when
drafting, and only the target's next-token laws are learned. The draft vocabulary is what occurs most in the responses.
Runs on a CPU or a GPU and resumes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from hydra.core.config_store import ConfigStore
from tokenizers import Tokenizer
from torch import Tensor

from algorithms.runtime.models.config.eagle import Eagle3Config
from algorithms.runtime.models.drafters.eagle import Eagle3Drafter
from algorithms.runtime.models.loading import Target
from experiments.train_eagle import HeadSettings, head_config
from experiments.training.batches import ResponseSet
from experiments.training.chain import ChainObjective, ChainSettings
from experiments.training.drafting import DrafterRunConfig
from experiments.training.program import command_line
from experiments.training.responses import KINDS, ResponseSource


@dataclass
class Eagle3Settings(HeadSettings):
    """Shape of the head. The published default of the layers needs a deeper target than the tiny one."""

    draft_vocab_size: int = 1536
    target_layer_ids: list[int] = field(default_factory=lambda: [1, 3, 4])


@dataclass
class TrainEagle3Config(DrafterRunConfig):
    """Schema of `configs/train_eagle3.yaml`."""

    out_dir: str = "outputs/train_eagle3"
    drafter: Eagle3Settings = field(default_factory=Eagle3Settings)
    chain: ChainSettings = field(default_factory=ChainSettings)


ConfigStore.instance().store(name="train_eagle3_schema", node=TrainEagle3Config)


class Eagle3Objective(ChainObjective):
    """Laws alone, unrolled."""

    title = "EAGLE-3 head"


def most_frequent(source: ResponseSource, vocab_size: int, count: int) -> Tensor:
    """`[count]` int64, rising: the tokens that occur most in the responses, both kinds weighing the same."""
    shares = sum(ResponseSet(source.training(kind), "cpu").token_shares(vocab_size) for kind in KINDS)
    return torch.from_numpy(np.sort(np.argsort(-np.asarray(shares), kind="stable")[:count]))


def build(config: TrainEagle3Config, target: Target, tokenizer: Tokenizer, source: ResponseSource) -> Eagle3Objective:
    """A fresh head and its objective."""
    shape = Eagle3Config(
        decoder=head_config(config.drafter, target.config),
        draft_vocab_size=config.drafter.draft_vocab_size,
        target_hidden_size=target.config.hidden_size,
        aux_layer_ids=tuple(config.drafter.target_layer_ids),
    )
    drafter = Eagle3Drafter(shape, target.config.num_layers)
    drafter.to(config.train.device)
    drafter.bind(target.model)
    if shape.reduced:
        ids = most_frequent(source, target.config.vocab_size, shape.draft_vocab_size)
        drafter.set_vocabulary(ids.to(config.train.device))
    drafter.reset_parameters()
    return Eagle3Objective(target.model, drafter, source, config, config.chain)


def main() -> None:
    """Command line entry."""
    command_line("train_eagle3", build)


if __name__ == "__main__":
    main()
