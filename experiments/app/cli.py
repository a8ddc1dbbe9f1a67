"""The command line: Hydra composes the configuration, a task runs, and an error fits on one screen.

Exit codes: 0 done, 1 a fault of the program (with its traceback), 2 something the user can fix, 3 done but not
lossless, 130 interrupted or terminated. Of several jobs the largest counts. `HYDRA_FULL_ERROR=1` shows the traceback of
every error.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from experiments.app.compose import build_config, dotted_keys, option_keys, register
from experiments.app.errors import UserError
from experiments.app.schema import CONFIG_FOLDER
from experiments.app.suggest import unknown_key_message, unknown_option_message

FULL_ERROR = "HYDRA_FULL_ERROR"
MAIN_CONFIG = "config"
RED, PLAIN = "\033[31m", "\033[0m"
Task = Callable[[Any, DictConfig], Any]


def main(task: Task, config_name: str = MAIN_CONFIG) -> None:
    """Compose `config_name` from the command line and call `task(checked, composed)` for every job."""
    asked = os.environ.get(FULL_ERROR)
    show_all = asked == "1"
    failures: list[UserError] = []
    started = False

    def job(cfg: DictConfig) -> Any:
        nonlocal started
        started = True
        try:
            return task(build_config(cfg), cfg)
        except UserError as error:
            if show_all:
                raise
            failures.append(error)  # not raised: the other jobs of a sweep still run
            report(str(error))
        finally:
            _remove_empty(Path(HydraConfig.get().runtime.output_dir))

    os.environ[FULL_ERROR] = "1"  # makes Hydra raise what it would otherwise print
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        register()
        hydra.main(version_base="1.3", config_path=str(CONFIG_FOLDER), config_name=config_name)(job)()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except (UserError, HydraException, OmegaConfBaseException, OSError) as error:
        if isinstance(error, OSError) and not isinstance(error, HydraException) and started:
            raise
        if show_all:
            traceback.print_exc()
        else:
            report(explain(error, config_name))
        sys.exit(getattr(error, "exit_code", UserError.exit_code))
    finally:
        signal.signal(signal.SIGTERM, before)
        os.environ.pop(FULL_ERROR) if asked is None else os.environ.update({FULL_ERROR: asked})
    if failures:
        sys.exit(max(error.exit_code for error in failures))


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


def explain(error: Exception, config_name: str) -> str:
    """What went wrong while composing, and the nearest setting that would have worked."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        where = "paths.outputs" if config_name == MAIN_CONFIG else "out_dir or hydra.run.dir"
        return f"the run folder cannot be created: {error}\ngive a folder that can be written as {where}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return unknown_option_message(group, option, [o for o in error.options if o != "schema"])
    text = str(error)
    if unknown := re.search(r"Could not override '([^']+)'|You must specify '([^']+)'", text):
        return _refused_override(next(filter(None, unknown.groups())), error, config_name)
    if missing := re.search(r"Could not find '?([\w/.-]+)'?", text):
        return _unknown_key(missing.group(1), text, config_name)
    if missing := re.search(r"Missing mandatory value: (\S+)", text):
        return f"{missing.group(1)} has no value: give it as {missing.group(1)}=…"
    return _composition_error(text, error.__cause__)


def _composition_error(text: str, cause: BaseException | None) -> str:
    lines = text.splitlines() + (str(cause).splitlines()[:1] if cause else [])
    if "Ambiguous value" in text:
        name = re.search(r"argument '([^'=]+)=", text)
        key = name.group(1) if name else "key"
        return (
            f"{lines[0]}\nto run once for each value, add -m\n"
            f"to give text with a comma, quote it twice: '{key}=\"a, b\"'\nto give a list, write '{key}=[a,b]'"
        )
    numbered = re.search(r"merging override (\+*)([\w.]+)\.(\d+)=(.*)", lines[0])
    if numbered and "(str) is incompatible with (int)" in "".join(lines):
        plus, key, number, value = numbered.groups()
        return f"{lines[0]}\na key that is a number goes into braces: '{plus or '+'}{key}={{{number}:{value}}}'"
    if re.search("LexerNoViableAlt|no viable alternative|mismatched input|token recognition|extraneous input", text):
        lines.append("quote text with spaces, commas or brackets twice: 'data.text=\"one, two (three)\"'")
    return "\n".join(line for line in dict.fromkeys(lines) if line.strip())


def _refused_override(key: str, error: Exception, config_name: str) -> str:
    """The message for a key that does not exist; a key of a mapping can be added."""
    text, cause = str(error), str(error.__cause__)
    inner = re.search(r"full_key: (\S+)", cause)
    addition = re.search(r"use (\+\S.*)", text)
    message = _unknown_key(inner.group(1) if inner else key, text, config_name)
    if "object_type=dict" in cause and addition:
        message += f"\nto add it to what is there: '{addition.group(1)}'"
    return message


def _unknown_key(key: str, text: str, config_name: str) -> str:
    """The message for a key that is not among those of the chosen options, which are composed to learn them."""
    groups = ["drafter"]  # of experiments.train
    if config_name == MAIN_CONFIG:
        groups = sorted(p.name for p in CONFIG_FOLDER.iterdir() if p.is_dir())
    cfg = _composed(config_name, chosen_options(sys.argv[1:], groups))
    if cfg is None:
        return text
    key = key.split("@")[0].lstrip("+~")
    elsewhere = option_keys() if config_name == MAIN_CONFIG else {}
    return unknown_key_message(key, list(dict.fromkeys([*dotted_keys(cfg), *groups])), elsewhere)


def chosen_options(arguments: Sequence[str], groups: Sequence[str]) -> list[str]:
    """The arguments that choose an option of a group; of several options in a sweep, the first."""
    found = (re.fullmatch(r"\+*([\w/]+)=([\w/.-]+)(,.*)?", argument) for argument in arguments)
    return [f"{match[1]}={match[2]}" for match in found if match and match[1] in groups]


def _composed(config_name: str, overrides: list[str]) -> DictConfig | None:
    """The configuration with `overrides`; without them where they do not compose; None where neither composes."""
    for tried in [overrides, []] if overrides else [[]]:
        GlobalHydra.instance().clear()
        try:
            with hydra.initialize_config_dir(config_dir=str(CONFIG_FOLDER), version_base="1.3"):
                return hydra.compose(config_name, tried)
        except (HydraException, OmegaConfBaseException):
            continue
    return None
