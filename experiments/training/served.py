"""What the engine makes of a drafter: tokens per step and acceptance by position on evaluation prompts.

A loss, or a simulation over known text, can be fine where serving is not. So the figures that a training run reports
come from the folder it has written, read back and served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from algorithms.registry import available
from algorithms.runtime.backends.registry import backends
from algorithms.runtime.engine import Engine
from algorithms.runtime.models.loading import Target
from algorithms.runtime.models.tokenizer import Tokenizer
from algorithms.runtime.request import Request
from algorithms.runtime.sampling_params import SamplingParams
from experiments.data.prompts import datasets, load_prompts
from experiments.report.metrics import summarize_method
from experiments.training.progress import progress
from experiments.training.text.writer import BACKEND, engine_settings
from specdec_kernels.checks import expect_at_least, expect_choice


@dataclass
class EvaluationSettings:
    """Greedy answers of up to `max_new_tokens` to the first `limit` prompts of each of the `sets`, as `data=` names
    them, `batch` at a time. During training they are served every `every_minutes`, if that is given, and at the end in
    any case."""

    sets: list[str] = field(default_factory=list)
    limit: int = 32
    max_new_tokens: int = 128
    batch: int = 16
    every_minutes: float | None = None

    def __post_init__(self) -> None:
        for name in self.sets:
            expect_choice("evaluation.sets", name, tuple(datasets()))
        for key in ("limit", "max_new_tokens", "batch"):
            expect_at_least(f"evaluation.{key}", getattr(self, key), 1)
        expect_at_least("evaluation.every_minutes", self.every_minutes, 0, nullable=True)


class ServedEvaluation:
    """The requests of the evaluation sets, and an engine for whatever drafter is to be judged."""

    def __init__(self, target: Target, tokenizer: Tokenizer, settings: EvaluationSettings) -> None:
        """Raises DataError for a set whose source cannot be used."""
        self.target, self.tokenizer, self.settings = target, tokenizer, settings
        sampling = SamplingParams(max_new_tokens=settings.max_new_tokens)
        room = target.config.max_position_embeddings - settings.max_new_tokens
        self.requests: dict[str, list[Request]] = {}
        for name in settings.sets:
            prompts = load_prompts(datasets()[name](limit=settings.limit)).prompts
            encoded = [ids for prompt in prompts if len(ids := prompt.encode(tokenizer)) <= room]
            self.requests[name] = [
                Request(number, tuple(ids), sampling, tokenizer.eos_ids) for number, ids in enumerate(encoded)
            ]

    def measure(self, algo: Any, folder: Path, label: str) -> dict[str, dict[str, Any]]:
        """Set to the figures of serving it by the algorithm that `algo` configures, with the drafter in `folder`."""
        requests = [request for asked in self.requests.values() for request in asked]
        if not requests:
            return {}
        device = self.target.model.model.norm.weight.device
        longest = max(request.max_length for request in requests)
        settings = engine_settings(device, self.settings.batch, longest, "none")
        algorithm = available()[algo.name](algo, self.target, str(folder))
        backend = backends()[BACKEND]
        engine = Engine(
            self.target, algorithm, backend(backend.Config(), settings.impl), settings, self.tokenizer.decode
        )
        found = {}
        for name, asked in self.requests.items():
            with progress(f"{label} on {name}") as show:
                generation = engine.generate(
                    asked, lambda r: show(r.num_finished / r.num_requests, f"{r.tokens_per_step:.3f} tokens a step")
                )
            found[name] = summarize_method(generation, algorithm.max_depth)
        return found


def summary(measured: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """What `training_summary.json` holds of figures by method and set: tokens per step, acceptance by position."""
    found: dict[str, Any] = {"tokens_per_step": {}, "acceptance_at": {}}
    for method, sets in measured.items():
        for name, figures in sets.items():
            found["tokens_per_step"].setdefault(name, {})[method] = round(figures["tokens_per_step"], 3)
            shares = [None if share is None else round(share, 3) for share in figures["acceptance_at"]]
            found["acceptance_at"].setdefault(name, {})[method] = shares
    return found
