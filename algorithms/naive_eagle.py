"""Naive EAGLE: target verify, acceptance and draft extend as one unit, with a single draft step by default.

With one step the head runs only when it extends over what was accepted. Its output there is the next draft, so a step
is one target forward and one head forward. The whole step is captured in one CUDA graph where the run captures at all;
`captured: false` runs the same code eagerly. Any number of steps, any tree and any page size work the same way.

The idea is that of SGLang's PR 6995; the acceptance is this project's own, which is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from algorithms.eagle import Eagle
from algorithms.runtime.algorithm import OwnLevel

if TYPE_CHECKING:
    from algorithms.runtime.models.loading import Target


class NaiveEagle(Eagle):
    """EAGLE or EAGLE-3 head, whichever the folder holds, in one graph."""

    name = "naive_eagle"
    kind = None

    @dataclass
    class Config(Eagle.Config):
        name: str = "naive_eagle"
        steps: int = 1
        captured: bool | None = None
        """Whether the step is one CUDA graph; None leaves it to the run (`runtime.graph`)."""

    def __init__(self, config: Any, target: Target, draft_path: str | None) -> None:
        super().__init__(config, target, draft_path)
        own = self.graph_of(config)
        self.graph = own.level if own else None

    @classmethod
    def graph_of(cls, config: Any) -> OwnLevel | None:
        if config.captured is None:
            return None
        return OwnLevel("step" if config.captured else "none", f"algo.captured={str(config.captured).lower()}")
