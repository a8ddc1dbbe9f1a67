"""Lets a target write: the engine without a drafter, many requests at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from algorithms.registry import available
from algorithms.runtime.backends.registry import backends
from algorithms.runtime.engine import Engine
from algorithms.runtime.engine_settings import EngineSettings
from algorithms.runtime.models.loading import Target
from algorithms.runtime.models.tokenizer import Tokenizer
from algorithms.runtime.request import Request
from algorithms.runtime.sampling_params import SamplingNeeds
from experiments.training.progress import progress

BACKEND = "fa4"
PREFILL_TOKENS_PER_ROW = 16
SMALLEST_CHUNK = 2048


def engine_settings(device: torch.device, batch: int, longest: int, graph: str) -> EngineSettings:
    """Compiled kernels on a GPU, and elsewhere their definitions, which are faster there than the interpreter.

    Long batches turn over many requests in a step, so chunks of prompts grow with the batch.
    """
    return EngineSettings(
        max_batch=batch,
        max_length=longest,
        impl="triton" if device.type == "cuda" else "reference",
        graph=graph if device.type == "cuda" else "none",
        prefill_chunk=max(SMALLEST_CHUNK, PREFILL_TOKENS_PER_ROW * batch),
    )


class Writer:
    """Answers requests of up to `longest` tokens, prompt and answer together."""

    def __init__(self, target: Target, tokenizer: Tokenizer, batch: int, longest: int) -> None:
        device = target.model.model.norm.weight.device
        settings = engine_settings(device, batch, longest, "step")
        algorithm = available()["autoregressive"]
        backend = backends()[BACKEND]
        self._engine = Engine(
            target,
            algorithm(algorithm.Config(), target, None),
            backend(backend.Config(), settings.impl),
            settings,
            tokenizer.decode,
        )

    def write(self, requests: Sequence[Request], label: str, quiet: bool = False) -> list[list[int]]:
        """The answers, stop tokens included; empty where the target gave no finite logits."""
        with progress(label, quiet) as show:
            generation = self._engine.generate(
                requests,
                lambda report: show(
                    report.num_finished / report.num_requests,
                    f"{report.num_finished:,} of {report.num_requests:,}  "
                    f"{report.emitted_tokens / max(report.elapsed_s, 1e-9):,.0f} tokens/s",
                ),
                needs=SamplingNeeds(sampled=True),
            )
        return [[] if completion.error else completion.token_ids for completion in generation.completions]
