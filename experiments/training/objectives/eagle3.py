"""EAGLE-3 heads: unrolled like EAGLE heads, with a loss on distributions alone, over the tokens that occur most."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from algorithms.runtime.models.config import Eagle3Config
from algorithms.runtime.models.drafters.eagle import Eagle3Drafter
from algorithms.runtime.models.loading import Target
from experiments.training.batches import ResponseSet
from experiments.training.objectives.drafter import DrafterTraining
from experiments.training.objectives.eagle import ChainObjective, ChainSettings, HeadSettings, head_config
from experiments.training.responses import KINDS, ResponseSource


@dataclass
class Eagle3Settings(HeadSettings):
    """Shape of the head. The published default of the layers needs a deeper target than the tiny one."""

    draft_vocab_size: int = 1536
    target_layer_ids: list[int] = field(default_factory=lambda: [1, 3, 4])


@dataclass
class Eagle3Training(DrafterTraining):
    """Schema of `drafter=eagle3`."""

    out_dir: str = "outputs/train_eagle3"
    drafter: Eagle3Settings = field(default_factory=Eagle3Settings)
    chain: ChainSettings = field(default_factory=ChainSettings)

    def objective(self, target: Target, tokenizer: Tokenizer, source: ResponseSource) -> ChainObjective:
        shape = Eagle3Config(
            decoder=head_config(self.drafter, target.config),
            draft_vocab_size=self.drafter.draft_vocab_size,
            target_hidden_size=target.config.hidden_size,
            aux_layer_ids=tuple(self.drafter.target_layer_ids),
        )
        drafter = Eagle3Drafter(shape, target.config.num_layers)
        drafter.to(self.train.device)
        drafter.bind(target.model)
        if shape.reduced:
            ids = most_frequent(source, target.config.vocab_size, shape.draft_vocab_size)
            drafter.set_vocabulary(ids.to(self.train.device))
        drafter.reset_parameters()
        return ChainObjective("EAGLE-3 head", target.model, drafter, source, self, self.chain)


def most_frequent(source: ResponseSource, vocab_size: int, count: int) -> Tensor:
    """`[count]` int64, rising: the tokens that occur most in the responses, both kinds weighing the same."""
    shares = sum(ResponseSet(source.training(kind), "cpu").token_shares(vocab_size) for kind in KINDS)
    return torch.from_numpy(np.sort(np.argsort(-np.asarray(shares), kind="stable")[:count]))
