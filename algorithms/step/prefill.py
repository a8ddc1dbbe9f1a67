"""Prefill between two steps: the target runs over a prefill of prompts, and the drafter sees the result.

A prefill runs at one of a few sizes, so it is one CUDA graph where whole steps are captured, and the same code
elsewhere. While others decode, prefill batches join their steps instead, see `step`.
"""

from collections.abc import Sequence
from functools import partial

from algorithms.engine.scheduler import PrefillSegment, tiles_of
from algorithms.step.context import StepParts
from algorithms.step.prefill_batch import PrefillBatch
from algorithms.step.runner import Captured, Recorder


class Prefiller:
    """Runs prefills, captured by `recorder` if there is one. `prefills` have different sizes, in ascending order."""

    def __init__(self, parts: StepParts, prefills: Sequence[PrefillBatch], recorder: Recorder | None = None) -> None:
        self._parts, self.prefills, self._recorder = parts, prefills, recorder
        self._captured: dict[int, Captured] = {}
        self._is_warm = parts.resources.device.type != "cuda"

    def prepare(self) -> None:
        """Capture every size, or compile what it launches, unless done. No request may be running."""
        if self._recorder is None:
            if not self._is_warm:
                self.warm_up()
            self._is_warm = True
            return
        # The largest first: the others then fit in the memory that it leaves.
        for prefill in reversed(self.prefills):
            if prefill.size not in self._captured:
                prefill.send(())
                self._captured[prefill.size] = self._recorder(partial(self._forward, prefill, self._parts.longest))

    @property
    def captures(self) -> bool:
        return self._recorder is not None

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        return tuple(prefill.size for prefill in self.prefills if prefill.size in self._captured)

    def warm_up(self) -> None:
        """Run every size of forward without a token: no request, cache or store is touched."""
        for prefill in self.prefills:
            prefill.send(())
            self._forward(prefill, 0)

    def run(self, segments: Sequence[PrefillSegment]) -> None:
        """Prefill `segments`, whose slots and pages are theirs. Together they fit the largest prefill."""
        prefill = prefill_for(self.prefills, segments)
        prefill.send(segments)
        if prefill.size in self._captured:
            self._captured[prefill.size].replay()
        else:
            ends = (segment.start + tiles_of(segment.num_tokens, prefill.tile) * prefill.tile for segment in segments)
            self._forward(prefill, max(ends) - prefill.tile)

    def _forward(self, prefill: PrefillBatch, longest: int) -> None:
        """The prefill that was sent last, whose tiles begin at position `longest` at most."""
        mixer = prefill.begin(longest)
        prefill.finish(*self._parts.resources.target.model(prefill.tokens, mixer, self._parts.algorithm.target_layers))


def prefill_for(prefills: Sequence[PrefillBatch], segments: Sequence[PrefillSegment]) -> PrefillBatch:
    """The smallest of `prefills`, which are in ascending order, that holds `segments`."""
    wanted = sum(tiles_of(segment.num_tokens, prefills[0].tile) for segment in segments)
    return next(prefill for prefill in prefills if prefill.size >= wanted)
