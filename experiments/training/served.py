"""The engine in training: answers of a target, and tokens per step and acceptance by position of a drafter.

The reported figures come from the exported folder, read back and served, because a loss or a simulation over known
text may hide a fault of serving.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from algorithms.algorithm import Algorithm
from algorithms.checked import Between, Checked
from algorithms.engine.engine import Engine
from algorithms.engine.request import Request
from algorithms.engine.settings import RuntimeSettings
from algorithms.frontend import load_algorithm, load_backend
from algorithms.models.loading import Target
from algorithms.models.tokenizer import Tokenizer
from algorithms.step.sampling_params import SamplingNeeds, SamplingParams
from experiments.data.prompts import datasets, load_prompts
from experiments.report.console import step_progress
from experiments.report.summarize import summarize_method

BACKEND = "fa4"
PREFILL_TOKENS_PER_SLOT = 16
SMALLEST_CHUNK = 2048


def engine_of(
    algorithm: Algorithm, target: Target, tokenizer: Tokenizer, batch: int, longest: int, graph: str
) -> Engine:
    """An engine with compiled kernels on a GPU, and elsewhere with their definitions, which are faster there than the
    interpreter. Large batches replace many requests in a step, so prefill chunks grow with the batch."""
    on_gpu = target.model.model.norm.weight.is_cuda
    settings = RuntimeSettings(
        max_batch=batch,
        max_length=longest,
        impl="triton" if on_gpu else "reference",
        graph=graph if on_gpu else "none",
        prefill_chunk=max(SMALLEST_CHUNK, PREFILL_TOKENS_PER_SLOT * batch),
    )
    return Engine(target, algorithm, load_backend(BACKEND, settings.impl), settings, tokenizer.decode)


class Writer:
    """Answers requests of up to `longest` tokens, prompt and answer together."""

    def __init__(self, target: Target, tokenizer: Tokenizer, batch: int, longest: int) -> None:
        algorithm = load_algorithm("autoregressive", target)
        self._engine = engine_of(algorithm, target, tokenizer, batch, longest, "step")

    def write(self, requests: Sequence[Request], label: str) -> list[list[int]]:
        """The answers, stop tokens included; empty where the target gave no finite logits."""
        with step_progress(Console(soft_wrap=True), label, len(requests)) as show:
            generation = self._engine.generate(requests, show, needs=SamplingNeeds(sampled=True))
        return [[] if completion.error else completion.token_ids for completion in generation.completions]


@dataclass
class EvaluationSettings(Checked):
    """Greedy answers of up to `max_new_tokens` to the first `limit` prompts of each of the `sets` (names of `data=`),
    `batch` at a time, at the end of training. Without sets the prompts are those of the held-out text."""

    GROUP = "evaluation."
    sets: Annotated[list[str], tuple(datasets())] = field(default_factory=list)
    limit: Annotated[int, Between(1)] = 32
    max_new_tokens: Annotated[int, Between(1)] = 128
    batch: Annotated[int, Between(1)] = 16


class ServedEvaluation:
    """The requests of the evaluation sets, for any drafter of the target."""

    def __init__(self, target: Target, tokenizer: Tokenizer, settings: EvaluationSettings) -> None:
        """Raises DataError for a set whose source cannot be used."""
        self.target, self.tokenizer, self.settings = target, tokenizer, settings
        self.requests: dict[str, list[Request]] = {}
        for name in settings.sets:
            prompts = load_prompts(datasets()[name](limit=settings.limit)).prompts
            self.ask(name, [prompt.encode(tokenizer) for prompt in prompts])

    def ask(self, name: str, prompts: Sequence[Sequence[int]]) -> None:
        """Measure the first of `prompts` too, those that leave room for an answer."""
        room = self.target.config.max_position_embeddings - self.settings.max_new_tokens
        fitting = [tuple(ids) for ids in prompts[: self.settings.limit] if len(ids) <= room]
        sampling = SamplingParams(max_new_tokens=self.settings.max_new_tokens)
        ends = self.tokenizer.eos_ids
        self.requests[name] = [Request(number, ids, sampling, ends) for number, ids in enumerate(fitting)]

    def measure(self, methods: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Tokens per step and acceptance by position, by set and label, served by the algorithms of `methods` with the
        drafter in `folder`."""
        found: dict[str, Any] = {"tokens_per_step": {}, "acceptance_at": {}}
        longest = max((request.max_length for listed in self.requests.values() for request in listed), default=0)
        for label, algo in methods.items() if longest else ():
            algorithm = load_algorithm(algo, self.target, folder)
            engine = engine_of(algorithm, self.target, self.tokenizer, self.settings.batch, longest, "none")
            for name, requests in self.requests.items():
                with step_progress(Console(soft_wrap=True), f"{label} on {name}", len(requests)) as show:
                    generation = engine.generate(requests, show)
                figures = summarize_method(generation, algorithm.max_depth)
                found["tokens_per_step"].setdefault(name, {})[label] = round(figures["tokens_per_step"], 3)
                shares = [None if share is None else round(share, 3) for share in figures["acceptance_at"]]
                found["acceptance_at"].setdefault(name, {})[label] = shares
        return found
