"""Faults that the fuzz injects into an engine: logits of requests that turn to NaN, and one allocation that fails."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from algorithms.engine.engine import Engine
from algorithms.engine.request import Request
from algorithms.step.step import Step

NEVER = 2**40
"""A length that no text has."""


class AllocationFailed(torch.OutOfMemoryError):
    """The error of torch's allocator, from here."""


class Faults:
    """What is injected into one engine."""

    def __init__(self, engine: Engine, draw: random.Random, requests: list[Request]) -> None:
        self._engine = engine
        broken = [request for request in requests if draw.random() < 0.15]
        self.from_length = {r.id: len(r.prompt_ids) - 1 + draw.randrange(r.sampling.max_new_tokens) for r in broken}
        """Committed tokens from which on the logits of a request are NaN."""
        self._node = {request.id: draw.choice((None, 0, draw.randrange(8))) for request in broken}
        self._countdown: int | None = None

    def may_break(self, request: Request) -> bool:
        return request.id in self.from_length

    def fail_an_allocation_after(self, calls: int | None) -> None:
        self._countdown = calls

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Break logits behind every verification, and let allocations fail in the algorithm, the target and the
        backend."""
        parts, verify = self._engine.parts, Step.verify

        def verified(step: Step) -> None:
            verify(step)
            if step._parts is parts:
                self._poison(step)

        patch.setattr(Step, "verify", verified)
        for holder, name in (
            (parts.algorithm, "propose"),
            (parts.algorithm, "propose_few"),
            (parts.algorithm, "observe"),
            (parts.resources.target.model, "forward"),
            (parts.resources.target.model, "logits"),
            (parts.resources.backend, "plan"),
        ):
            patch.setattr(holder, name, self._may_fail(getattr(holder, name)))

    def _may_fail(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            if self._countdown is not None:
                self._countdown -= 1
                if self._countdown < 0:
                    self._countdown = None
                    raise AllocationFailed("an allocation of this round fails")
            return call(*arguments, **options)

        return called

    def _poison(self, step: Step) -> None:
        lengths = step._batch.lengths.tolist()
        for running in self._engine.scheduler.running:
            number = running.request.id
            if running.slot < len(lengths) and lengths[running.slot] >= self.from_length.get(number, NEVER):
                node = self._node[number]
                nodes = slice(None) if node is None else min(node, step.logits.shape[1] - 1)
                step.logits[running.slot, nodes] = float("nan")
