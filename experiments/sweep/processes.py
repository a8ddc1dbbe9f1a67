"""Jobs in processes of their own, over the slots of one machine: one slot, or one for each visible GPU.

With `share`, a slot keeps one process for all jobs of a target, which is loaded once.
"""

import ctypes
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection

from omegaconf import DictConfig

from experiments.app.cli import INTERRUPTED
from experiments.app.errors import UserError
from experiments.app.identity import SHARE_TARGET, target_id
from experiments.app.schema import REPO_ROOT
from experiments.sweep.folder import DONE, FAILED, KILLED, REFUSED, RUNNING
from experiments.sweep.job import Job, located

VISIBLE = "CUDA_VISIBLE_DEVICES"
PR_SET_PDEATHSIG = 1
TAIL_LINES = 3


def slots(gpus_per_job: int) -> list[dict[str, str]]:
    """Environment variables of the processes of each slot: one slot, or one for every `gpus_per_job` visible GPUs.
    Raises UserError where fewer GPUs are visible."""
    if gpus_per_job == 0:
        return [{}]
    import torch

    named = os.environ.get(VISIBLE)
    found = named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]
    groups = [found[i : i + gpus_per_job] for i in range(0, len(found) - gpus_per_job + 1, gpus_per_job)]
    if not groups:
        raise UserError(
            f"hydra/launcher=gpus: a job needs {gpus_per_job} GPUs, and {len(found)} are visible\n"
            "use hydra/launcher=basic or hydra/launcher=joblib"
        )
    return [{VISIBLE: ",".join(group)} for group in groups]


def python_path() -> str:
    """PYTHONPATH of processes that find this repository."""
    return os.pathsep.join(filter(None, [str(REPO_ROOT), os.environ.get("PYTHONPATH")]))


def run_one(cfg: DictConfig) -> None:
    """Run one job, for a launcher of Hydra on any machine."""
    run_jobs([located(cfg)], slots(0))


def run_jobs(jobs: Sequence[Job], slots: Sequence[dict[str, str]], share: bool = False) -> None:
    """Run `jobs` that are not done. An interrupt ends the processes that run."""
    targets = {job.id: target_id(job.record.config) if share else job.id for job in jobs}
    waiting = deque(sorted((job for job in jobs if not job.done), key=lambda job: targets[job.id] if share else ""))
    workers: set[Worker] = set()

    def serve_slot(variables: dict[str, str]) -> None:
        worker = None
        while waiting:
            with suppress(IndexError):  # another slot has taken the last job
                job = waiting.popleft()
                if worker is None or worker.process.poll() is not None or worker.target != targets[job.id]:
                    if worker is not None:
                        worker.close()
                    workers.add(worker := Worker(targets[job.id], variables | ({SHARE_TARGET: "1"} if share else {})))
                worker.run(job)
        if worker is not None:
            worker.close()

    with ThreadPoolExecutor(len(slots)) as pool:
        running = [pool.submit(serve_slot, slot) for slot in slots]
        try:
            for slot in running:
                slot.result()
        except BaseException:
            waiting.clear()
            for worker in workers:
                worker.process.terminate()
            raise


class Worker:
    """A process that runs jobs of one target, one after the other."""

    def __init__(self, target: str, variables: dict[str, str]) -> None:
        self.target = target
        self._pipe, theirs = multiprocessing.Pipe()
        begin = f"from experiments.sweep.processes import serve; serve({theirs.fileno()}, {os.getpid()})"
        environment = {**os.environ, "PYTHONPATH": python_path(), **variables}
        self.process = subprocess.Popen(
            [sys.executable, "-c", begin], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment
        )
        theirs.close()

    def run(self, job: Job) -> None:
        """Run a job, wait for it, and note how it ended where its process could not do so itself."""
        folder, record, log = job.folder, job.record, job.folder.log(job.id)
        log.parent.mkdir(parents=True, exist_ok=True)
        name = folder.swept(record) or job.id
        print(f"running  {name}  {os.path.relpath(log)}", flush=True)
        where = [f"sweep.name={quoted(folder.name)}", f"hydra.run.dir={quoted(str(folder.path / job.id))}"]
        force = ["sweep.force=true"] if job.force else []
        try:
            self._pipe.send((record.program, [*record.overrides, *where, *force], str(log)))
            code = self._pipe.recv()
        except (EOFError, OSError):
            code = self.process.wait()
        record, state = job.record, folder.state(job.id)
        noted = record.ended not in (None, RUNNING)
        if not noted and state not in (DONE, RUNNING):  # with exit code 0 too: it may not have been a run
            killed = code < 0 or code == INTERRUPTED
            record.ended = REFUSED if code == UserError.exit_code else KILLED if killed else FAILED
            ending = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
            record.exit_code, record.reason = code, "\n".join([ending, *lines[-TAIL_LINES:]])
            folder.write(record)
        print(f"{folder.state(job.id):8} {name}" + (f"  {record.wall_s:.0f} s" if record.wall_s else ""), flush=True)

    def close(self) -> None:
        """Let the process end."""
        self._pipe.close()
        self.process.wait()


def serve(handle: int, parent: int) -> None:
    """The process of a worker: run programs until the pipe is closed, and free the device's memory after each."""
    if sys.platform.startswith("linux"):  # no job goes on when its parent has ended
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
    pipe = Connection(handle)
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            program, arguments, log = pipe.recv()
            with open(log, "wb") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            code = _run_program(program, arguments)
            sys.stdout.flush()
            sys.stderr.flush()
            gc.collect()
            if (torch := sys.modules.get("torch")) and torch.cuda.is_initialized():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            pipe.send(code)


def _run_program(program: Sequence[str], arguments: Sequence[str]) -> int:
    """Run a program as `python PROGRAM ARGUMENTS` does, and return its exit code."""
    sys.argv = [program[-1], *arguments]
    try:
        if program[0] == "-m":
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as ending:
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
            return 1
        return ending.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def quoted(text: str) -> str:
    """`text` as one value of Hydra's command line."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
