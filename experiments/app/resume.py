"""Going on with a run that was interrupted: `run.py resume=FOLDER`.

The folder says what was typed, from where and at which revision. The same words are composed again, and the result must
be the configuration of the folder; then the run goes on with the requests that had not ended.
"""

import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from experiments.app.errors import UserError
from experiments.app.files import locked, read_object
from experiments.app.identity import what_matters
from experiments.app.provenance import git_revision
from experiments.report.tables import flatten

STATUS, CONFIG, SUMMARY = "status.json", "config.yaml", "summary.json"
RESUME, FORCE = "resume", "resume_force"
ALIVE_S = 60.0  # a run on another machine whose heartbeat is younger than this is taken to go on


def read_status(folder: Path) -> dict[str, Any]:
    """status.json of a run folder. Raises UserError where there is none that can be read."""
    found = read_object(folder / STATUS)
    if found is None:
        why = f"which has no {STATUS} that can be read" if folder.exists() else "which does not exist"
        raise UserError(f"{RESUME}: expected the folder of a run, such as outputs/NAME/TIME; got {folder}, {why}")
    return found


def resumed_words(words: Sequence[str]) -> list[str]:
    """`words` of a command line as they are, or the words of the run that `resume=FOLDER` names. Raises UserError if
    that is no interrupted run, or if another setting is given too."""
    named = [word.partition("=")[2] for word in words if word.lstrip("+").startswith(f"{RESUME}=")]
    if not any(named) or named[-1] == "null":
        return list(words)
    folder = Path(named[-1].strip("'\"")).expanduser().absolute()
    own = [word for word in words if word.lstrip("+").split("=")[0] in (RESUME, FORCE)]
    others = [word for word in words if word not in own]
    status = read_status(folder)
    forced = any(word.lstrip("+") == f"{FORCE}=true" for word in own)
    if changed := [word for word in others if not word.startswith("-")]:
        raise UserError(f"{RESUME} takes the settings of the run: leave out {' '.join(changed)}, or start a new run")
    if not isinstance(status.get("overrides"), list):
        raise UserError(f"{RESUME}={folder}: {STATUS} does not hold the settings of the run: expected overrides")
    if status.get("status") == "done" or (folder / SUMMARY).is_file():
        raise UserError(f"{RESUME}={folder}: this run is done")
    if is_running(folder, status):
        raise UserError(f"{RESUME}={folder}: this run is still running, as process {status.get('pid')}")
    if not (folder / CONFIG).is_file():
        again = shlex.join(["python", "run.py", *map(str, status["overrides"])])
        raise UserError(f"{RESUME}={folder}: the run ended before it began to decode\nstart it again: {again}")
    if status.get("cwd") != os.getcwd() and not forced:
        raise UserError(f"{RESUME}={folder}: the run was started in another folder: cd {status.get('cwd')}")
    where = [f"{RESUME}='{folder}'", f"hydra.run.dir='{folder}'", f"{FORCE}={str(forced).lower()}"]
    return [*others, *status["overrides"], *where]


def is_running(folder: Path, status: Mapping[str, Any]) -> bool:
    """Whether a process runs in `folder`: it locks it, or its heartbeat on another machine is young."""
    if status.get("status") != "running":
        return False
    if status.get("host") == socket.gethostname():
        with locked(folder) as free:
            return not free
    try:
        seen = datetime.fromisoformat(status.get("heartbeat") or status["started"])
        return (datetime.now(timezone.utc) - seen).total_seconds() < ALIVE_S
    except (KeyError, TypeError, ValueError):
        return False


def check_unchanged(folder: Path, composed: DictConfig, forced: bool) -> None:
    """Raise UserError, unless `forced`, where configuration or revision differ from the run in `folder`."""
    now, then = (flatten(what_matters(each), by=".") for each in (composed, _stored(folder)))
    differing = [key for key in dict.fromkeys([*then, *now]) if then.get(key) != now.get(key)]
    changes = [f"{key}: {then.get(key)} in the run, {now.get(key)} now" for key in differing]
    before, revision = read_status(folder).get("revision"), git_revision()
    changes += [f"revision: {before} in the run, {revision} now"] if before != revision else []
    if changes and not forced:
        shown = "\n".join(changes[:8])
        raise UserError(f"{RESUME}={folder}: what made the run has changed\n{shown}\n{FORCE}=true goes on all the same")


def _stored(folder: Path) -> Any:
    """The configuration of the run in `folder`. Raises UserError where its file is not whole."""
    try:
        found = OmegaConf.load(folder / CONFIG)
    except (OSError, ValueError, YAMLError) as error:
        raise UserError(f"{RESUME}={folder}: {CONFIG} cannot be read: {error}") from error
    if not isinstance(found, DictConfig) or not found:
        raise UserError(f"{RESUME}={folder}: {CONFIG} holds no settings\nstart the run again")
    return found
