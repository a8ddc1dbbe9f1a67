"""All requests through one algorithm: the part that every task shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from experiments.app.errors import user_errors
from experiments.app.plan import Setup, make_engine
from experiments.app.schema import GenerateConfig
from experiments.report.console import step_progress

if TYPE_CHECKING:
    from algorithms.runtime.engine import Generation
    from algorithms.runtime.request import Request

AUTOREGRESSIVE = "autoregressive"


@dataclass(frozen=True)
class Decoded:
    """One decoding of all requests and what it was done with."""

    generation: Generation
    max_depth: int
    rule: str
    served: dict[str, str]
    """Phase of the attention to what computed it."""

    def comparable(self, requests: Sequence[Request]) -> bool:
        """Whether the tokens must be those of autoregressive decoding, and not only of the same law."""
        return self.rule == "target_only" or all(request.sampling.temperature == 0 for request in requests)


def baseline_config() -> Any:
    """The configuration of autoregressive decoding."""
    from algorithms.registry import available

    return available()[AUTOREGRESSIVE].Config()


def decode(
    config: GenerateConfig,
    setup: Setup,
    algo: Any,
    console: Console,
    requests: Sequence[Request] | None = None,
    label: str | None = None,
) -> Decoded:
    """Decode `requests` (default: the run's) with `algo`, behind a short decoding that no clock sees."""
    from algorithms.runtime.engine import EngineError

    asked = list(setup.requests if requests is None else requests)
    engine, algorithm, backend = make_engine(config, setup, algo)
    with user_errors(EngineError):
        # Compilation and first imports are no part of a step: they are paid here, before the clock runs.
        for count, tokens in warm_up_sizes(setup.hardware.label == "triton", config.runtime.max_batch):
            engine.generate(
                [r.with_sampling(max_new_tokens=min(tokens, r.sampling.max_new_tokens)) for r in asked[:count]]
            )
        engine.forget()
        with step_progress(console, label or algo.name, len(asked)) as on_step:
            generation = engine.generate(asked, on_step)
    return Decoded(generation, algorithm.max_depth, algorithm.rule, dict(backend.served))


def warm_up_sizes(compiled: bool, max_batch: int) -> list[tuple[int, int]]:
    """(requests, new tokens) of the decodings before the clock runs.

    Kernels are compiled for powers of two of a batch, and prompts enter a running batch in any number; so every size is
    prefilled once, and then several batches pass through.
    """
    from algorithms.runtime.cuda_graph import buckets

    if not compiled:
        return [(1, 2)]
    return [(size, 2) for size in buckets(max_batch)] + [(4 * max_batch, 32)]
