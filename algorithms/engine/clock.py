"""The time of steps by named phases.

On a GPU two CUDA events bracket a phase, so measuring adds no synchronisation. A phase lasts from the end of the work
queued before it to the end of its own, including the wait for the host. Elsewhere the clock is `time.perf_counter`.
Phases inside of one CUDA graph pass borders of `Stamps` instead, which sum the device's clock on the device.
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class Stamps:
    """Phases of captured work, which times itself; time outside of begin and end counts for no phase."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._place = {name: place for place, name in enumerate(names, start=1)}
        self._times = torch.zeros(1 + len(names), dtype=torch.int64, device=device)

    def begin(self) -> None:
        self._pass_border(0)

    def end(self, name: str) -> None:
        self._pass_border(self._place[name])

    def reset(self) -> None:
        self._times.zero_()

    def phase_times_ms(self) -> dict[str, float]:
        counted = self._times.tolist()
        return {name: counted[place] / 1e6 for name, place in self._place.items()}

    def _pass_border(self, place: int) -> None:
        from specdec_kernels.clock import pass_border

        pass_border(self._times, place)


class PhaseClock:
    """Sums the time of named phases on one device. Phases may not be nested: their time would count twice."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._inside: str | None = None
        self._stamps: list[Stamps] = []
        self.reset()

    def reset(self) -> None:
        self._total_ms: dict[str, float] = defaultdict(float)
        self._pending: deque[tuple[str, Any, Any]] = deque()
        for stamps in self._stamps:
            stamps.reset()

    def stamps(self, names: Sequence[str]) -> Stamps:
        """Stamps for the phases `names` of captured work; this clock counts them too."""
        self._stamps.append(Stamps(names, self._device))
        return self._stamps[-1]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the block under `name`."""
        if self._inside is not None:
            raise RuntimeError(f"phase {name!r} begins inside phase {self._inside!r}")
        self._inside = name
        self._total_ms[name] += 0.0
        self._collect()
        start = self.mark()
        try:
            yield
        finally:
            self._inside = None
            self._pending.append((name, start, self.mark()))

    def phase_times_ms(self) -> dict[str, float]:
        """Milliseconds by phase since the start or the last `reset`, in the order of first use."""
        if self._device.type == "cuda" and self._pending:
            torch.cuda.synchronize(self._device)
        self._collect()
        phase_times = dict(self._total_ms)
        for stamps in self._stamps:
            for name, spent_ms in stamps.phase_times_ms().items():
                phase_times[name] = phase_times.get(name, 0.0) + spent_ms
        return phase_times

    def mark(self) -> Any:
        """The end of the work queued so far; see `between_ms`."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between_ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two marks that the device has passed."""
        return float((end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end))

    def _collect(self) -> None:
        """Add up the phases at the front of the queue that the device has finished."""
        while self._pending and (isinstance(end := self._pending[0][2], float) or end.query()):
            name, *marks = self._pending.popleft()
            self._total_ms[name] += self.between_ms(*marks)
