"""The command line as a user meets it: every mistake gets one screen, an exit code and no rest."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from experiments.app import cli
from experiments.app.errors import UserError
from experiments.app.schema import REPO_ROOT

RUN = str(REPO_ROOT / "run.py")
HEAVY = ("torch", "transformers", "wandb", "triton", "datasets")
SCREEN_LINES = 24


def command(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1", **variables}
    environment.pop("HYDRA_FULL_ERROR", None) if "HYDRA_FULL_ERROR" not in variables else None
    return subprocess.run(
        [sys.executable, RUN, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )


MISTAKES = {
    "unknown algorithm": (["algo=dflsh"], ["unknown algo 'dflsh'", "algo=dflash", "autoregressive"]),
    "misspelt key": (["data.limt=3"], ["unknown key 'data.limt'", "data.limit=…"]),
    "wrong setting in a sweep": (["algo=ngram,eagle", "algo.num_node=3", "-m"], ["'algo.num_node'", "algo.num_nodes"]),
    "out of range": (["sampling.max_new_tokens=0"], ["sampling.max_new_tokens", "at least 1"]),
    "missing prompt file": (["data=jsonl", "data.path=nowhere.jsonl"], ["nowhere.jsonl", "no such file"]),
}
"""A few in processes of their own; test_wrong_inputs.py has the whole table."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_screen_and_leaves_nothing(mistake: str, tmp_path: Path) -> None:
    arguments, expected = MISTAKES[mistake]
    done = command(tmp_path, *arguments)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= SCREEN_LINES
    for text in expected:
        assert text in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_every_job_of_a_sweep_reports_its_own_mistake(tmp_path: Path) -> None:
    done = command(tmp_path, "-m", "sampling.temperature=-1,-2")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "got -1.0" in done.stderr and "got -2.0" in done.stderr


def test_the_whole_traceback_is_there_on_request(tmp_path: Path) -> None:
    done = command(tmp_path, "sampling.max_new_tokens=0", HYDRA_FULL_ERROR="1")
    assert done.returncode == 2 and "Traceback" in done.stderr and "__post_init__" in done.stderr


def test_showing_the_configuration_is_quick(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = command(tmp_path, "--cfg", "job")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and "algo:" in done.stdout
    spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent_s < 1.0, "processor time, so that a busy machine does not decide"


def test_showing_the_configuration_imports_nothing_heavy(tmp_path: Path) -> None:
    script = (
        f"import runpy, sys; sys.argv = [{RUN!r}, '--cfg', 'job']; sys.path.insert(0, {str(REPO_ROOT)!r})\n"
        f"runpy.run_path({RUN!r}, run_name='__main__')\n"
        f"print('heavy:', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert "heavy: []" in done.stdout, done.stdout[-500:] + done.stderr[-2000:]


def test_run_py_is_short() -> None:
    assert len(Path(RUN).read_text().splitlines()) < 60


@pytest.mark.parametrize("override", ["sampling.logit_bias={5:1.5,7:-2}", "+sampling.logit_bias={5:1.5,7:-2}"])
def test_biases_of_tokens_reach_the_task(job: Path, monkeypatch: pytest.MonkeyPatch, override: str) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "tracker=none", override])
    seen: list[dict[int, float]] = []
    cli.main(lambda config, composed: seen.append(config.sampling.logit_bias))
    assert seen == [{5: 1.5, 7: -2.0}]


def test_biases_of_tokens_in_a_file_reach_the_task(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job / "mine").mkdir()
    (job / "mine/biased.yaml").write_text("# @package _global_\nsampling:\n  logit_bias: {5: 1.5}\n")
    monkeypatch.setattr(sys, "argv", ["run.py", f"hydra.searchpath=[file://{job}]", "+mine=biased"])
    seen: list[dict[int, float]] = []
    cli.main(lambda config, composed: seen.append(config.sampling.logit_bias))
    assert seen == [{5: 1.5}]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", "tracker=none"])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    return tmp_path


def ending(task: Any) -> Any:
    with pytest.raises(SystemExit) as caught:
        cli.main(task)
    return caught.value.code


@pytest.mark.parametrize("program", ["collect", "peer_generate", "train", "kernel_tune", "kernel_bench"])
def test_every_program_explains_itself(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    # Seconds of reading all groups, which none of these texts shows.
    monkeypatch.setattr("hydra._internal.hydra.Hydra.format_config_groups", lambda *_, **__: "all groups")
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    with pytest.raises(SystemExit) as caught:
        import_module(f"experiments.{program}").main()
    shown = capsys.readouterr()
    assert not caught.value.code and not shown.err
    assert f"python -m experiments.{program} " in shown.out
    assert "Hydra" not in shown.out and "all groups" not in shown.out


def test_a_reader_of_the_output_may_end_first(job: Path) -> None:
    kept = os.dup(1)
    try:
        assert ending(Mock(side_effect=BrokenPipeError)) == cli.INTERRUPTED
    finally:
        os.dup2(kept, 1)


def test_interrupts_exit_as_shells_expect(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(config: Any, composed: Any) -> None:
        raise KeyboardInterrupt

    assert ending(interrupted) == 130
    assert "interrupted" in capsys.readouterr().err


def test_errors_of_the_user_are_told_without_a_traceback(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(config: Any, composed: Any) -> None:
        raise UserError("the pool is too small\nraise runtime.num_pages")

    assert ending(refused) == 2
    assert capsys.readouterr().err == "error: the pool is too small\n  raise runtime.num_pages\n"
    assert list(job.iterdir()) == []


def test_faults_of_the_program_keep_their_traceback(job: Path) -> None:
    def broken(config: Any, composed: Any) -> None:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        cli.main(broken)


def test_the_task_gets_checked_objects_and_its_folder(job: Path) -> None:
    seen: dict[str, Any] = {}

    def task(config: Any, composed: Any) -> None:
        from hydra.core.hydra_config import HydraConfig

        seen.update(config=config, folder=Path(HydraConfig.get().runtime.output_dir))

    cli.main(task)
    assert seen["config"].algo.name == "dflash" and seen["config"].tracker.name == "none"
    assert seen["folder"].parent == job / "outputs" / seen["config"].name


def test_a_fault_of_the_program_may_be_one_of_files(job: Path) -> None:
    def broken(config: Any, composed: Any) -> None:
        raise FileNotFoundError("a bug")

    with pytest.raises(FileNotFoundError):
        cli.main(broken)


TERMINATED = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from hydra.core.hydra_config import HydraConfig
from experiments.app import cli
from experiments.report.run_folder import open_run_folder

def task(config, composed):
    with open_run_folder(Path(HydraConfig.get().runtime.output_dir)):
        print("ready", flush=True)
        time.sleep(200)

sys.argv = ["run.py", "name=told"]
cli.main(task)
"""


def test_a_run_that_is_terminated_says_so(tmp_path: Path) -> None:
    program = [sys.executable, "-c", TERMINATED.format(root=str(REPO_ROOT))]
    with subprocess.Popen(program, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            process.terminate()
            _, told = process.communicate(timeout=100)
        finally:
            process.kill()
    (status,) = tmp_path.glob("outputs/told/*/status.json")
    assert process.returncode == 130 and told.startswith("interrupted\n  requests that had ended: 0, in ")
    assert told.endswith(f"  go on with resume={status.parent}\n")
    assert json.loads(status.read_text())["status"] == "interrupted"
