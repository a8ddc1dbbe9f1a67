"""The standalone draft model: a small decoder that imitates the target.

With p the target's next-token distribution and q the draft's, loss = KL(p, q) + c CE(q, x) for the token x that the
target wrote: sampled acceptance depends on the first term, greedy acceptance on the second. The draft has at most a
sixth of the target's parameters, and its folder loads like the target's.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.models.decoder import Decoder
from algorithms.models.dense_mixer import DenseMixer
from algorithms.standalone import Standalone
from experiments.training.batches import TrainingBatch, shifted
from experiments.training.objectives import drafter as base

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
class DistillSettings:
    """`token_weight` is c of the loss; `draft_len` the drafts that tokens per step are reported for."""

    token_weight: float = 0.5
    draft_len: int = 4


@dataclass
class DraftTraining(base.DrafterTraining):
    drafter: DraftSettings = field(default_factory=DraftSettings)
    distill: DistillSettings = field(default_factory=DistillSettings)

    def objective(self, setting: base.Setting) -> DistillObjective:
        """A fresh draft and its objective; ValueError where the draft is too large to be worth drafting with."""
        target = setting.target
        draft = Decoder(base.draft_decoder(target.config, **vars(self.drafter), tie_word_embeddings=True))
        own, theirs = (sum(parameter.numel() for parameter in model.parameters()) for model in (draft, target.model))
        if own > LARGEST_SHARE * theirs:
            raise ValueError(f"drafter: expected at most a sixth of the target's {theirs:,} parameters, got {own:,}")
        draft.reset_parameters()
        draft.to(self.train.device)
        for name in COMPANIONS:
            if (target.path / name).is_file():
                shutil.copyfile(target.path / name, Path(self.out_dir) / name)
        return DistillObjective(draft, setting, self.distill)


class DistillObjective(base.DrafterObjective):
    """A small decoder and its target, on the same rows."""

    title = "standalone draft"
    model: Decoder

    def __init__(self, draft: Decoder, setting: base.Setting, settings: DistillSettings) -> None:
        super().__init__(draft, setting, settings.draft_len)
        self.settings = settings
        self.mixers = {model: DenseMixer(model.config, self.length, self.device) for model in (self.target, draft)}

    def _logits(self, model: Decoder, tokens: Tensor) -> Tensor:
        return model.logits(model(tokens, self.mixers[model])[0])

    def methods(self) -> dict[str, Any]:
        return {f"chain_{self.draft_len}": Standalone.Config(steps=self.draft_len)}

    def batch_loss(self, batch: TrainingBatch, rng: np.random.Generator, progress: float = 1.0) -> Tensor:
        with torch.no_grad():
            target = self._logits(self.target, batch.tokens).float().log_softmax(-1)
        draft = self._logits(self.model, batch.tokens).float().log_softmax(-1)
        divergence = F.kl_div(draft, target, reduction="none", log_target=True).sum(-1)
        cross_entropy = -draft.gather(-1, shifted(batch.tokens, 1)[..., None]).squeeze(-1)
        counted = batch.continues(1)
        return ((divergence + self.settings.token_weight * cross_entropy) * counted).sum() / counted.sum()

    def leading(self, batch: TrainingBatch) -> Tensor:
        drafted = self._logits(self.model, batch.tokens).argmax(-1)
        hits = (drafted == shifted(batch.tokens, 1)) & batch.continues(1)
        return base.leading_hits(torch.stack([shifted(hits, step) for step in range(self.draft_len)], dim=-1))


SCHEMAS = {"draft": DraftTraining}
