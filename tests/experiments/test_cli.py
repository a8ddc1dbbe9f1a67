"""The command line as a user meets it: every mistake gets one screen, an exit code and no rest."""

import json
import os
import re
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from experiments.app import cli, provenance
from experiments.app.errors import UserError
from experiments.app.schema import REPO_ROOT

RUN = str(REPO_ROOT / "run.py")
HEAVY = ("torch", "transformers", "wandb", "triton", "datasets")


def command(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1", **variables}
    environment.pop("HYDRA_FULL_ERROR", None) if "HYDRA_FULL_ERROR" not in variables else None
    return subprocess.run(
        [sys.executable, RUN, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=250
    )


def test_a_mistake_gets_one_screen_and_leaves_nothing(tmp_path: Path) -> None:
    """In a process of its own; test_wrong_inputs.py has the table of mistakes."""
    done = command(tmp_path, "data.limt=3")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: unknown key 'data.limt'") and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_showing_the_configuration_is_quick_and_imports_nothing_heavy(tmp_path: Path) -> None:
    script = (
        f"import runpy, sys, time; sys.argv = [{RUN!r}, '--cfg', 'job']; sys.path.insert(0, {str(REPO_ROOT)!r})\n"
        f"runpy.run_path({RUN!r}, run_name='__main__')\n"
        f"print('heavy:', [name for name in {HEAVY!r} if name in sys.modules], time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=250)
    found = re.search(r"heavy: \[\] ([\d.]+)\n", done.stdout)
    assert found and "algo:" in done.stdout, done.stdout[-500:] + done.stderr[-2000:]
    libraries = "import hydra.main, omegaconf, rich.console, numpy, time; print(time.process_time())"
    alone = subprocess.run([sys.executable, "-c", libraries], capture_output=True, text=True, check=True)
    assert float(found[1]) < 3.5 * float(alone.stdout), "processor time, compared with that of the libraries alone"


def test_python_without_the_environment_is_told_to_activate_it(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-S", RUN, "data.limit=1"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert " is not installed in this Python" in done.stderr and "source .venv/bin/activate" in done.stderr


def test_an_interrupt_during_imports_shows_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "hydra.py").write_text("raise KeyboardInterrupt")
    done = command(tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == cli.INTERRUPTED and not done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_streams_get_plain_characters_where_they_cannot_encode(encoding: str) -> None:
    script = "from experiments.app.cli import *; write_plain_characters(); print('2.1× · – ± é █▉▎ 木 ~')"
    environment = {**os.environ, "PYTHONPATH": str(REPO_ROOT), "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
    latin = "2.1× · - ± é ##  ? ~"
    assert done.stdout.decode(encoding).strip() == (latin if encoding == "latin-1" else "2.1x | - +- e ##  ? ~")


def test_other_code_has_another_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    def revision() -> str:
        provenance._repository_revision.cache_clear()
        return str(provenance.git_revision())

    for name in ("SPECDEC_REVISION", "SPECDEC_ALGORITHMS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(provenance, "REPO_ROOT", tmp_path)
    code, page = tmp_path / "code.py", tmp_path / "page.md"
    for file in (code, page):
        file.write_text("1\n")
    git("init"), git("add", "."), git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "a")
    found = [revision()]
    page.write_text("2\n")
    assert revision() == found[0] and "-" not in found[0]
    for text in ("2\n", "3\n"):
        code.write_text(text)
        found.append(revision())
    (tmp_path / "new_drafter.py").write_text("1\n")
    found.append(revision())
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SPECDEC_ALGORITHMS", "new_drafter")
    found.append(revision())
    assert len(set(found)) == 5 and all("-dirty-" in text for text in found[1:]) and "-plugins-" in found[-1]
    provenance._repository_revision.cache_clear()


@pytest.mark.parametrize(
    "words",
    [
        ["sampling.logit_bias={5:1.5,7:-2}"],
        ["+sampling.logit_bias={5:1.5,7:-2}"],
        ["hydra.searchpath=[file://FOLDER]", "+mine=biased"],
    ],
)
def test_biases_of_tokens_reach_the_task(job: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    """As typed, as added and in a file."""
    (job / "mine").mkdir()
    (job / "mine/biased.yaml").write_text("# @package _global_\nsampling:\n  logit_bias: {5: 1.5, 7: -2}\n")
    words = [word.replace("FOLDER", str(job)) for word in words]
    monkeypatch.setattr(sys, "argv", ["run.py", "tracker=none", *words])
    seen: list[dict[int, float]] = []
    cli.main(lambda config, composed: seen.append(config.sampling.logit_bias))
    assert seen == [{5: 1.5, 7: -2.0}]


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


@pytest.mark.parametrize("program", ["collect", "train", "kernel_bench"])
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


def test_errors_of_the_user_are_told_without_a_traceback(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless it is asked for."""
    refused = Mock(side_effect=UserError("the pool is too small\nraise runtime.num_pages"))
    assert ending(refused) == 2
    assert capsys.readouterr().err == "error: the pool is too small\n  raise runtime.num_pages\n"
    assert list(job.iterdir()) == []
    monkeypatch.setenv(cli.FULL_ERROR, "1")
    assert ending(refused) == 2 and "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("fault", [ZeroDivisionError, FileNotFoundError])
def test_faults_of_the_program_keep_their_traceback(job: Path, fault: type[Exception]) -> None:
    with pytest.raises(fault):
        cli.main(Mock(side_effect=fault("a bug")))


def test_the_task_gets_checked_objects_and_its_folder(job: Path) -> None:
    seen: dict[str, Any] = {}

    def task(config: Any, composed: Any) -> None:
        from hydra.core.hydra_config import HydraConfig

        seen.update(config=config, folder=Path(HydraConfig.get().runtime.output_dir))

    cli.main(task)
    assert seen["config"].algo.name == "dflash" and seen["config"].tracker.name == "none"
    assert seen["folder"].parent == job / "outputs" / seen["config"].name


def test_a_run_that_is_terminated_says_so(tmp_path: Path) -> None:
    """SIGTERM as an interrupt from the keyboard: exit code 130."""
    environment = {**os.environ, "PYTHONPATH": str(REPO_ROOT), "TOY_WAIT_S": "200"}
    program = [sys.executable, str(REPO_ROOT / "tests/experiments/toy_sweep.py"), "limit=1"]
    with subprocess.Popen(program, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            end = time.monotonic() + 100
            status = tmp_path / "outputs/toy/now/status.json"
            while not (status.is_file() and status.read_text()) and time.monotonic() < end:
                time.sleep(0.01)
            process.terminate()
            _, told = process.communicate(timeout=100)
        finally:
            process.kill()
    assert process.returncode == 130 and told.startswith("interrupted\n"), told
    assert json.loads((tmp_path / "outputs/toy/now/status.json").read_text())["status"] == "interrupted"
