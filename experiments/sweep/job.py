"""One job of a sweep, in the process that runs it: it owns the folder, resumes what was killed and records the end."""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from experiments.app.errors import NotLossless, UserError
from experiments.app.hardware import is_main_process
from experiments.app.identity import job_id, what_matters
from experiments.app.resume import check_unchanged
from experiments.sweep.folder import DONE, FAILED, KILLED, REFUSED, RUNNING, JobRecord, SweepFolder

JOB_KEYS = ("sweep.share_baseline=",)  # settings of a sweep that a job has too
Task = Callable[[Any, DictConfig], Any]


@dataclass(frozen=True)
class Job:
    """A job that waits in `folder`; `force` runs it though it is done."""

    folder: SweepFolder
    id: str
    force: bool = False

    @property
    def record(self) -> JobRecord:
        found = self.folder.record(self.id)
        assert found is not None, f"sweep {self.folder.name} has no job {self.id}"
        return found

    @property
    def done(self) -> bool:
        """Whether there is nothing to run."""
        return not self.force and self.folder.summary(self.id) is not None


def as_job(task: Task, program: Sequence[str]) -> Task:
    """`task`, run as a job where `sweep.name` names a sweep: a done job is not run again, a broken one is."""

    def run(config: Any, composed: DictConfig) -> Any:
        if config.sweep.name is None:
            return task(config, composed)
        output = Path(HydraConfig.get().runtime.output_dir)
        folder = SweepFolder(output.parent)
        job = Job(folder, output.name, config.sweep.force)
        if hasattr(config, "out_dir"):
            config = replace(config, out_dir=str(output), resume=config.resume and not config.sweep.force)
        if not is_main_process():
            # Rank 0 owns the job and records it; it cannot end before the others have joined.
            return None if job.done else task(config, composed)
        with folder.claim(job.id) as owned:
            if not owned:
                raise UserError(f"job {job.id} of sweep {folder.name} is run by another process")
            if job.done:
                print(f"done before: {output}")
                return getattr(folder.record(job.id), "value", None)
            record = folder.record(job.id) or new_record(composed, list(HydraConfig.get().overrides.task), program)
            return _run_owned(task, _resumed(config, composed, job, record), composed, folder, record)

    return run


def _run_owned(task: Task, config: Any, composed: DictConfig, folder: SweepFolder, record: JobRecord) -> Any:
    """Run `task` and record its end, all but an interrupt."""
    record = replace(record, ended=RUNNING, reason="", exit_code=None, value=None)
    folder.write(record)
    started = time.monotonic()
    try:
        record.value = task(config, composed)
        record.ended, record.exit_code = DONE, 0
    except UserError as error:
        record.ended, record.reason = DONE if isinstance(error, NotLossless) else REFUSED, str(error)
        record.exit_code = error.exit_code
        raise
    except Exception as error:
        record.ended, record.exit_code, record.reason = FAILED, 1, f"{type(error).__name__}: {error}"
        raise
    finally:
        if record.ended != RUNNING:
            record.wall_s = round(time.monotonic() - started, 3)
            folder.write(record)
    return record.value


def _resumed(config: Any, composed: DictConfig, job: Job, record: JobRecord) -> Any:
    """`config`, set to resume the job if it was killed and can be resumed; otherwise its folder is removed. A training
    goes on from its checkpoint by itself."""
    left = job.folder.path / job.id
    if hasattr(config, "out_dir"):
        return config
    if hasattr(config, "resume") and record.ended in (RUNNING, KILLED) and not job.force:
        try:
            check_unchanged(left, composed, forced=False)
            return replace(config, resume=str(left))
        except (UserError, ValueError, OSError):
            pass  # another revision, a task that cannot be resumed, or a torn file: the job starts again
    shutil.rmtree(left, ignore_errors=True)
    return config


def new_record(cfg: DictConfig, overrides: list[str], program: Sequence[str]) -> JobRecord:
    kept = [text for text in overrides if text.startswith(JOB_KEYS) or not text.startswith(("sweep.", "hydra."))]
    return JobRecord(job_id(cfg), kept, list(program), what_matters(cfg))


def located(cfg: DictConfig) -> Job:
    """The job whose id is in what Hydra has composed."""
    return Job(SweepFolder(Path(cfg.folder)), str(cfg.job), bool(cfg.force))
