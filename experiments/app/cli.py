"""The command line: Hydra composes the configuration, a task runs, and an error fits on one screen.

Exit codes: 0 done, 1 a fault of the program (with its traceback), 2 something the user can fix, 3 done but not
lossless, 130 interrupted or terminated. Of several jobs the largest counts. `HYDRA_FULL_ERROR=1` shows the traceback of
every error.
"""

import codecs
import logging
import os
import re
import signal
import sys
import traceback
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from experiments.app.compose import MAIN_CONFIG, build_config, every_key, option_keys, register
from experiments.app.errors import UserError, disk_is_full, unknown_key_message, unknown_option_message
from experiments.app.resume import resumed_words
from experiments.app.schema import CONFIG_FOLDER
from experiments.app.task_schema import METHODS_HINT

FULL_ERROR = "HYDRA_FULL_ERROR"
INTERRUPTED = 130
RED, PLAIN = "\033[31m", "\033[0m"
HELP = ("-h", "--help")
NOISE = ("See https://", "LexerNoViableAlt", "set HYDRA_FULL_ERROR", "reference_type", "object_type")
"""Lines of Hydra and OmegaConf that help nobody who types."""
_SETTING = re.compile(r"[+~\w][^=\s]*=|~")
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
    write_plain_characters()
    asked = os.environ.get(FULL_ERROR)
    program = Program(show_all=asked == "1")
    os.environ[FULL_ERROR] = "1"  # makes Hydra raise what it would otherwise print
    logging.raiseExceptions = False  # or a log that cannot be written, as wandb's on a full disk, fills the screen
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # the run folder records it
    try:
        words = arranged(sys.argv[1:])
        sys.argv[1:] = resumed_words(words) if config_name == MAIN_CONFIG else words
        register()
        yield program
    except KeyboardInterrupt as error:
        print("\n  ".join(["interrupted", *str(error).splitlines()]), file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of the output has ended, as `head` does after its lines
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


def arranged(words: Sequence[str]) -> list[str]:
    """`words` with the options before the settings, as Hydra needs them. Raises UserError for another word."""
    settings = [word for word in words if _SETTING.match(word)]
    options = [word for word in words if not _SETTING.match(word)]
    parser: Any = get_args_parser()
    parser.error = _refuse_option
    for stray in parser.parse_args(options).overrides:
        raise UserError(f"{stray!r} is no setting: expected key=value without spaces around '=', or an option as -m")
    return options + settings


def _refuse_option(message: str) -> NoReturn:
    raise UserError(f"{message}\noptions and settings are listed by --help")


def explain(error: Exception, config_name: str | None = None) -> str:
    """`error` in a few lines, with what to type instead: the nearest valid keys or options."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        where = "paths.outputs" if config_name == MAIN_CONFIG else "out_dir or hydra.run.dir"
        if disk_is_full(error):
            return f"the disk is full: {error}\nmake room, or give another folder as {where}"
        return f"the run folder cannot be created: {error}\ngive a folder that can be written as {where}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return unknown_option_message(group, option, [o for o in error.options if o != "schema"])
    cause = error.__cause__ or error
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and cause.parent_node is not None:
        keys = [key for key, _ in every_key(cause.parent_node._get_root()) if not key.startswith("hydra")]
        message = unknown_key_message(str(cause.full_key), keys, option_keys() if config_name == MAIN_CONFIG else {})
        addition = re.search(r"use (\+\S.*)", str(error))
        if addition and cause.object_type is dict:
            message += f"\nto add it to what is there: '{addition[1]}'"
        return message
    lines = dict.fromkeys(line.strip() for line in f"{error}\n{error.__cause__ or ''}".splitlines())
    hints = [METHODS_HINT] if "task.methods" in str(error) else []
    if isinstance(error, OverrideParseException):
        hints.append(f"in {error.override}\ntext with special characters needs quotes inside of quotes: 'key=\"text\"'")
    return "\n".join([*(line for line in lines if line and not line.startswith(NOISE)), *hints])


SPELLED = {"–": "-", "—": "-", "·": "|", "×": "x", "±": "+-", "…": "...", "→": "->", "≥": ">=", "≤": "<=", "█": "#"}
SPELLED |= {part: "#" if part < "▌" else " " for part in "▉▊▋▌▍▎▏"}  # of a bar: halves are rounded down
HANDLER = "specdec.plain"


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Replacements for characters that a stream cannot encode."""
    assert isinstance(error, UnicodeEncodeError)
    found = []
    for character in error.object[error.start : error.end]:
        letters = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
        found.append(SPELLED.get(character) or letters or "?")
    return "".join(found), error.end


def write_plain_characters() -> None:
    """Let the standard streams write plain characters in place of those that they cannot encode. Files are UTF-8."""
    codecs.register_error(HANDLER, _plain)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=HANDLER)
