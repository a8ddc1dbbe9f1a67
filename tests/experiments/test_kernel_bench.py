"""The timer and the unit benchmark: what is counted, what is refused, and that no wrong kernel gets a
time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from rich.console import Console

from algorithms.runtime.clock import PhaseClock
from experiments import kernel_bench
from experiments.config import CONFIG_FOLDER, REPO_ROOT
from experiments.kernel_bench import KernelBenchConfig, chosen_cases, disagreement
from experiments.measure import cold_copies, provenance, tensors_in, time_function
from specdec_kernels import FAMILIES

CPU = torch.device("cpu")


def test_the_median_is_of_the_repeats_after_the_warm_up() -> None:
    calls: list[int] = []

    def work(pause_s: float) -> None:
        calls.append(len(calls))
        time.sleep(pause_s * (50 if len(calls) <= 2 else 1))

    timing = time_function(work, [dict(pause_s=0.002)], CPU, warmup=2, repeats=5)
    assert len(calls) == 7 and timing.repeats == 5 and timing.clock == "perf_counter"
    assert 2 <= timing.low_ms <= timing.median_ms <= timing.high_ms
    assert timing.low_ms < 100, "the slow warm-up calls were counted"


def test_arguments_take_turns() -> None:
    seen = []
    time_function(lambda index: seen.append(index), [dict(index=i) for i in range(3)], CPU, warmup=0, repeats=6)
    assert seen == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("options", [dict(repeats=0), dict(warmup=-1)])
def test_a_measurement_of_nothing_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        time_function(lambda: None, [{}], CPU, **options)
    with pytest.raises(ValueError, match="got none"):
        time_function(lambda: None, [], CPU)


def test_phases_add_up_and_keep_their_order() -> None:
    clock = PhaseClock("cpu")
    for _ in range(2):
        for name, pause_s in (("draft", 0.002), ("verify", 0.004)):
            with clock.phase(name):
                time.sleep(pause_s)
    ledger = clock.ledger_ms()
    assert list(ledger) == ["draft", "verify"]
    assert ledger["draft"] >= 4 and ledger["verify"] >= 8
    clock.reset()
    assert clock.ledger_ms() == {}


def test_a_phase_that_raises_is_counted_and_closed() -> None:
    clock = PhaseClock("cpu")
    with pytest.raises(KeyError), clock.phase("draft"):
        raise KeyError
    with clock.phase("draft"), pytest.raises(RuntimeError, match="'verify' begins inside phase 'draft'"):
        clock.phase("verify").__enter__()
    assert list(clock.ledger_ms()) == ["draft"]


@pytest.mark.gpu
def test_device_phases_are_device_time() -> None:
    clock = PhaseClock("cuda")
    a = torch.randn(4096, 4096, device="cuda")
    with clock.phase("verify"):
        for _ in range(20):
            a = a @ a
    assert clock.ledger_ms()["verify"] > 1


def test_provenance_says_where_a_number_comes_from() -> None:
    found = provenance("cpu")
    assert found["versions"]["torch"] == torch.__version__ and found["machine"] and found["platform"]
    assert "git_revision" in found


def test_inputs_are_not_copied_where_there_is_no_cache_to_fill() -> None:
    inputs = dict(x=torch.zeros(3), nested=(torch.ones(2), [torch.ones(1)]), number=3)
    assert len(list(tensors_in(inputs))) == 3
    assert cold_copies(inputs, CPU) == [inputs]


def test_a_wrong_kernel_is_noticed() -> None:
    """Too large an error, a wrong integer, a stray NaN, and a wrong write to an argument."""

    def kernel(fault: str, values: torch.Tensor, impl: str) -> Any:
        out, index = values * 2, torch.arange(3)
        if impl == "triton" and fault == "float":
            out[1] += 1e-3
        if impl == "triton" and fault == "integer":
            index[2] = 7
        if impl == "triton" and fault == "nan":
            out[0] = float("nan")
        if impl == "triton" and fault == "argument":
            values[0] = 5.0
        return out, index

    assert disagreement(kernel, dict(fault="none", values=torch.ones(3))) is None
    for fault in ("float", "integer", "nan", "argument"):
        assert disagreement(kernel, dict(fault=fault, values=torch.ones(3))) is not None, fault


def test_without_a_gpu_one_small_case_a_family() -> None:
    found = list(chosen_cases(KernelBenchConfig(), CPU))
    assert [family for family, _ in found] == list(FAMILIES)
    assert all("large" not in case.tags for _, case in found)


def test_a_kernel_that_disagrees_gets_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_bench, "disagreement", lambda *_: "tensor 0 differs")
    config = KernelBenchConfig(family="tree", device="cpu", repeats=1)
    assert not kernel_bench.run(config, tmp_path, Console(quiet=True))
    row = json.loads((tmp_path / "results.jsonl").read_text())
    assert row["parity"] == "tensor 0 differs" and "median_ms" not in row


@pytest.mark.skipif(torch.cuda.is_available(), reason="the command without a GPU")
def test_the_command_writes_rows_with_provenance(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "experiments.kernel_bench",
        "family=tree",
        "repeats=2",
        f"hydra.run.dir={tmp_path}",
    ]
    done = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "say nothing about the speed on a GPU" in " ".join(done.stdout.split())
    row = json.loads((tmp_path / "results.jsonl").read_text())
    assert row["parity"] == "ok" and row["median_ms"] > 0 and row["config"]["repeats"] == 2
    assert {"machine", "versions", "git_revision", "platform", "clock", "device", "dtype"} <= row.keys()


def test_a_misspelt_key_fails_while_composing() -> None:
    with initialize_config_dir(config_dir=str(CONFIG_FOLDER), version_base="1.3"):
        assert compose("kernel_bench", overrides=["family=tree"]).family == "tree"
        with pytest.raises(ConfigCompositionException, match="famly"):
            compose("kernel_bench", overrides=["famly=tree"])


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(family="trees"), "family must be one of all, tree"),
        (dict(limit=0), "limit must be at least 1, got 0"),
        (dict(repeats=0), "repeats must be at least 1"),
        (dict(dtype="int8"), "dtype must be one of"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KernelBenchConfig(**options)
