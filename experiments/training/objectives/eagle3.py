"""EAGLE-3 heads: unrolled like EAGLE heads, with a loss on distributions alone, over the tokens that occur most."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from algorithms.eagle3 import Eagle3
from algorithms.runtime.models.config import Eagle3Config
from algorithms.runtime.models.config.eagle import NUM_FEATURES, default_aux_layer_ids
from algorithms.runtime.models.drafters.eagle import Eagle3Drafter
from experiments.training.batches import ResponseSet
from experiments.training.objectives.drafter import DrafterTraining, Setting
from experiments.training.objectives.eagle import ChainObjective, ChainSettings, HeadSettings, head_config
from specdec_kernels.checks import expect_at_least

PUBLISHED_VOCABULARY = 32_000
SMALLEST_PUBLISHED_TARGET = 7
"""Layers from which on the published rule names three different ones."""


@dataclass
class Eagle3Settings(HeadSettings):
    """Shape of the head.

    None takes what the published heads have: 32,000 draft tokens, or a quarter of a vocabulary that is not much
    larger; and features of a low, a middle and a high layer of the target.
    """

    draft_vocab_size: int | None = None
    target_layer_ids: list[int] | None = None

    def __post_init__(self) -> None:
        expect_at_least("drafter.draft_vocab_size", self.draft_vocab_size, 1, nullable=True)


@dataclass
class Eagle3Training(DrafterTraining):
    """Schema of `drafter=eagle3`."""

    out_dir: str = "outputs/train_eagle3"
    drafter: Eagle3Settings = field(default_factory=Eagle3Settings)
    chain: ChainSettings = field(default_factory=ChainSettings)

    def objective(self, setting: Setting) -> ChainObjective:
        target = setting.target.config
        shape = Eagle3Config(
            decoder=head_config(self.drafter, target),
            draft_vocab_size=self.drafter.draft_vocab_size or draft_vocabulary(target.vocab_size),
            target_hidden_size=target.hidden_size,
            aux_layer_ids=tuple(self.drafter.target_layer_ids or feature_layers(target.num_layers)),
        )
        drafter = Eagle3Drafter(shape, target.num_layers)
        drafter.to(self.train.device)
        drafter.bind(setting.target.model)
        if shape.reduced:
            ids = most_frequent(setting.training, target.vocab_size, shape.draft_vocab_size)
            drafter.set_vocabulary(ids.to(self.train.device))
        drafter.reset_parameters()
        return ChainObjective("EAGLE-3 head", drafter, setting, self.chain, Eagle3.Config)


def draft_vocabulary(vocab_size: int) -> int:
    """Draft tokens of a head for a target of `vocab_size` tokens."""
    return PUBLISHED_VOCABULARY if vocab_size >= 3 * PUBLISHED_VOCABULARY else max(1, vocab_size // 4)


def feature_layers(num_target_layers: int) -> tuple[int, ...]:
    """The published layers, or evenly spaced ones of a target too shallow for them."""
    if num_target_layers >= SMALLEST_PUBLISHED_TARGET:
        return default_aux_layer_ids(num_target_layers)
    return tuple(round(i * (num_target_layers - 1) / (NUM_FEATURES - 1)) for i in range(NUM_FEATURES))


def most_frequent(responses: ResponseSet, vocab_size: int, count: int) -> Tensor:
    """`[count]` int64, rising: the tokens that occur most in the answers."""
    counts = responses.token_counts(vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]))
