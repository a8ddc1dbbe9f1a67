"""Borders between the parts of captured work: what is summed where, and a kernel that compiles for every chip."""

from pathlib import Path

import pytest
import torch

from specdec_kernels import clock
from specdec_kernels.clock import pass_border
from tests.kernels.test_compile_gate import run_program


def test_time_counts_for_the_part_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches time between an end and the next beginning that counts for a part."""
    ticks = iter([1_000, 4_000, 9_000, 50_000, 51_000, 53_000])
    monkeypatch.setattr(clock.time, "perf_counter_ns", lambda: next(ticks))
    times = torch.zeros(3, dtype=torch.int64)
    for place in (0, 1, 2, 0, 1, 2):
        pass_border(times, place)
    assert times.tolist() == [53_000, 3_000 + 1_000, 5_000 + 2_000]


@pytest.mark.timeout(600)
def test_the_kernel_compiles_for_every_chip(tmp_path: Path) -> None:
    """Each target reads its own clock: the other's instruction would not assemble."""
    run_program(
        tmp_path,
        """
        from specdec_kernels.clock import pass_border
        from specdec_kernels.launch import record_launches

        times = torch.zeros(5, dtype=torch.int64)
        for chip in CHIPS:
            with record_launches(chip) as launched:
                pass_border(times, 0), pass_border(times, 4)
            jobs = {job_of("clock", chip, one) for one in launched}
            assert len(jobs) == 1, "every border is one kernel"
            usage = compile_job(jobs.pop())
            assert isinstance(usage, Usage) and usage.spill_bytes == 0, usage
        """,
    )


@pytest.mark.gpu
def test_replays_sum_device_time() -> None:
    """The parts of a captured graph last as long as events around its replays say."""
    times = torch.zeros(3, dtype=torch.int64, device="cuda")
    a = torch.randn(4096, 4096, device="cuda") / 4096

    def work() -> None:
        pass_border(times, 0)
        for place, count in ((1, 10), (2, 30)):
            for _ in range(count):
                torch.mm(a, a)
            pass_border(times, place)

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times.zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(5):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    _, first, second = (ns / 1e6 for ns in times.tolist())
    assert 2.5 < second / first < 3.5
    assert first + second == pytest.approx(start.elapsed_time(end), rel=0.1)
