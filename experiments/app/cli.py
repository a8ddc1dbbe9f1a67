"""The command line: Hydra composes the configuration, a task runs, and an error fits on one screen.

Exit codes: 0 done, 1 a fault of the program (with its traceback), 2 something the user can fix, 3 done but not
lossless, 130 interrupted or terminated. Of several jobs the largest counts. `HYDRA_FULL_ERROR=1` shows the traceback of
every error.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from experiments.app.arguments import arranged
from experiments.app.compose import build_config, register
from experiments.app.errors import UserError, disk_is_full
from experiments.app.explain import MAIN_CONFIG, explain
from experiments.app.resume import resumed_words
from experiments.app.schema import CONFIG_FOLDER

FULL_ERROR = "HYDRA_FULL_ERROR"
INTERRUPTED = 130
RED, PLAIN = "\033[31m", "\033[0m"
Task = Callable[[Any, DictConfig], Any]


def main(task: Task, config_name: str = MAIN_CONFIG) -> None:
    """Compose `config_name` from the command line and call `task(checked, composed)`."""
    failures: list[UserError] = []
    with exits_of_errors(config_name) as program:

        def job(cfg: DictConfig) -> Any:
            program.started = True
            try:
                return task(build_config(cfg), cfg)
            except UserError as error:
                if program.show_all:
                    raise
                failures.append(error)
                report(str(error))
            finally:
                _remove_empty(Path(HydraConfig.get().runtime.output_dir))

        hydra.main(version_base="1.3", config_path=str(CONFIG_FOLDER), config_name=config_name)(job)()
    if failures:
        sys.exit(max(error.exit_code for error in failures))


@dataclass
class Program:
    """A program that runs: whether its job has begun, and whether every error shows its traceback."""

    show_all: bool
    started: bool = False


@contextmanager
def exits_of_errors(config_name: str) -> Iterator[Program]:
    """Register the schemas, and end the process with one screen of text and an exit code where the block fails."""
    asked = os.environ.get(FULL_ERROR)
    program = Program(show_all=asked == "1")
    os.environ[FULL_ERROR] = "1"  # makes Hydra raise what it would otherwise print
    logging.raiseExceptions = False  # or a log that cannot be written, as wandb's on a full disk, fills the screen
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        words = arranged(sys.argv[1:])
        sys.argv[1:] = resumed_words(words) if config_name == MAIN_CONFIG else words
        register()
        yield program
    except KeyboardInterrupt as error:
        print("\n  ".join(["interrupted", *str(error).splitlines()]), file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # whoever read the output has ended, as `head` does behind its lines
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(INTERRUPTED)
    except (UserError, HydraException, OmegaConfBaseException, OSError) as error:
        of_files = isinstance(error, OSError) and not isinstance(error, HydraException) and not disk_is_full(error)
        if of_files and program.started:
            raise
        if program.show_all:
            traceback.print_exc()
        else:
            report(explain(error, config_name))
        sys.exit(getattr(error, "exit_code", UserError.exit_code))
    finally:
        signal.signal(signal.SIGTERM, before)
        os.environ.pop(FULL_ERROR) if asked is None else os.environ.update({FULL_ERROR: asked})


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Treat SIGTERM as an interrupt, so that the run folder records it."""
    raise KeyboardInterrupt


def _remove_empty(folder: Path) -> None:
    """Remove the folders that Hydra made for a job that wrote nothing."""
    for path in (folder, *folder.parents):
        if path == Path.cwd():
            return
        try:
            path.rmdir()
        except FileNotFoundError:
            continue  # the run has removed it already
        except OSError:
            return


def report(message: str) -> None:
    """Print `message` as an error, in red where a terminal shows it."""
    head, *rest = message.strip().splitlines() or ["unknown error"]
    text = "\n".join([f"error: {head}", *(f"  {line}" for line in rest)])
    print(f"{RED}{text}{PLAIN}" if sys.stderr.isatty() and "NO_COLOR" not in os.environ else text, file=sys.stderr)
