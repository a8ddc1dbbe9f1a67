"""The clock of a step: phases add up, in the order in which they began."""

import time

import pytest
import torch

from algorithms.engine.clock import PhaseClock
from specdec_kernels import clock as kernel_clock


def test_phases_add_up_and_keep_their_order() -> None:
    clock = PhaseClock("cpu")
    for _ in range(2):
        for name, pause_s in (("draft", 0.002), ("verify", 0.004)):
            with clock.phase(name):
                time.sleep(pause_s)
    phase_times = clock.phase_times_ms()
    assert list(phase_times) == ["draft", "verify"]
    assert phase_times["draft"] >= 4 and phase_times["verify"] >= 8
    clock.reset()
    assert clock.phase_times_ms() == {}


def test_a_phase_that_raises_is_counted_and_closed() -> None:
    clock = PhaseClock("cpu")
    with pytest.raises(KeyError), clock.phase("draft"):
        raise KeyError
    with clock.phase("draft"), pytest.raises(RuntimeError, match="'verify' begins inside phase 'draft'"):
        clock.phase("verify").__enter__()
    assert list(clock.phase_times_ms()) == ["draft"]


@pytest.mark.gpu
def test_device_phases_are_device_time() -> None:
    clock = PhaseClock("cuda")
    a = torch.randn(4096, 4096, device="cuda")
    with clock.phase("verify"):
        for _ in range(20):
            a = a @ a
    assert clock.phase_times_ms()["verify"] > 1


def test_stamps_are_part_of_the_phase_times(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0, 2_000_000, 5_000_000])
    monkeypatch.setattr(kernel_clock.time, "perf_counter_ns", lambda: next(ticks))
    phases = PhaseClock("cpu")
    stamps = phases.stamps(["draft", "verify"])
    stamps.begin(), stamps.end("draft"), stamps.end("verify")
    assert phases.phase_times_ms() == {"draft": 2.0, "verify": 3.0}
    phases.reset()
    assert phases.phase_times_ms() == {"draft": 0.0, "verify": 0.0}
