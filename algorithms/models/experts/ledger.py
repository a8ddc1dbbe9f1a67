"""How many experts the steps of a run touch: sums on the device, which are read when the run ends."""

from __future__ import annotations

import torch
from torch import nn

from algorithms.models.experts.module import Experts


class ExpertLedger:
    """Counts of all layers with experts in one model. `note` belongs into a step, after the model's forward, and can be
    captured with it."""

    def __init__(self, model: nn.Module) -> None:
        """ValueError for a model without experts; see `of`."""
        self._layers = [module for module in model.modules() if isinstance(module, Experts)]
        if not self._layers:
            raise ValueError("experts: expected a model that has layers with experts, got none")
        # Touched experts, and rows with experts, of all layers together; forwards.
        self._sums = torch.zeros(3, dtype=torch.int64, device=self._layers[0].gate.weight.device)

    @classmethod
    def of(cls, model: nn.Module) -> ExpertLedger | None:
        """A ledger, or None for a model without experts."""
        return cls(model) if any(isinstance(module, Experts) for module in model.modules()) else None

    def reset(self) -> None:
        self._sums.zero_()

    def note(self) -> None:
        """Count the model's last forward."""
        schedules = [layer.schedule for layer in self._layers]
        given = [schedule for schedule in schedules if schedule is not None]
        touched = torch.cat([schedule.num_touched for schedule in given]).sum()
        assigned = torch.stack([schedule.starts[-1] for schedule in given]).sum()
        self._sums.add_(torch.stack([touched, assigned, torch.ones_like(touched)]))

    def report(self) -> dict[str, float]:
        """Means over layers and steps: experts that are touched in a step, rows of a step that are tokens (nodes, and
        prompts that joined), and touched experts for each of these. Empty before a step; waits for the device."""
        touched, assigned, steps = self._sums.tolist()
        if not steps:
            return {}
        layers, topk = len(self._layers), self._layers[0].routing.topk
        return {
            "num_experts": self._layers[0].experts.num_experts,
            "touched_per_step": touched / (layers * steps),
            "rows_per_step": assigned / (layers * topk * steps),
            "touched_per_row": touched * topk / assigned if assigned else 0.0,
        }
