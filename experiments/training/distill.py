"""Distillation of a standalone draft: the target's law at every position of its own continuations.

With p the target's next-token law and q the draft's, loss = KL(p, q) + c CE(q, x): the first term is what sampled
acceptance depends on, the second what greedy acceptance does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.runtime.models.decoder import Decoder
from algorithms.runtime.models.dense_mixer import DenseMixer
from experiments.training.acceptance import leading_hits
from experiments.training.batches import TrainingBatch, shifted
from experiments.training.drafting import DrafterObjective, DrafterRunConfig
from experiments.training.responses import ResponseSource


@dataclass
class DistillSettings:
    """`token_weight` is c of the loss; `draft_len` the drafts that tokens per step are reported for."""

    token_weight: float = 0.5
    draft_len: int = 4


class DistillObjective(DrafterObjective):
    """A small decoder beside its target, on the same rows."""

    title = "standalone draft"
    drafter: Decoder

    def __init__(
        self,
        target: Decoder,
        draft: Decoder,
        source: ResponseSource,
        config: DrafterRunConfig,
        settings: DistillSettings,
    ) -> None:
        super().__init__(draft, source, config)
        self.target, self.settings = target, settings
        self.draft_lens = (settings.draft_len,)
        self.mixers = {
            model: DenseMixer(model.config, target.config.max_position_embeddings, self.device)
            for model in (target, draft)
        }

    def _logits(self, model: Decoder, tokens: Tensor) -> Tensor:
        return model.logits(model(tokens, self.mixers[model])[0])

    def hf_config(self) -> dict[str, Any]:
        return self.drafter.config.to_hf()

    def batch_loss(self, batch: TrainingBatch, rng: np.random.Generator) -> Tensor:
        with torch.no_grad():
            law = self._logits(self.target, batch.tokens).float().log_softmax(-1)
        shares = self._logits(self.drafter, batch.tokens).float().log_softmax(-1)
        divergence = F.kl_div(shares, law, reduction="none", log_target=True).sum(-1)
        surprise = -shares.gather(-1, shifted(batch.tokens, 1)[..., None]).squeeze(-1)
        counted = batch.continues(1)
        return ((divergence + self.settings.token_weight * surprise) * counted).sum() / counted.sum()

    def leading(self, batch: TrainingBatch) -> Tensor:
        drafted = self._logits(self.drafter, batch.tokens).argmax(-1)
        hits = (drafted == shifted(batch.tokens, 1)) & batch.continues(1)
        ahead = [shifted(hits, step) for step in range(self.settings.draft_len)]
        return leading_hits(torch.stack(ahead, dim=-1))
