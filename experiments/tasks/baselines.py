"""Decodings of the target alone that the rows of a sweep share: one for each target, prompts, sampling and runtime.

The first row that needs one decodes and stores it; rows that need it meanwhile wait. A run that decodes the same
baseline several times shares each repeat by its number. Another machine, revision or version of a package decodes anew.
"""

from __future__ import annotations

import fcntl
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.app.identity import digest
from experiments.app.plan import Plan
from experiments.app.provenance import git_revision, machine, versions
from experiments.app.workload import Workload
from experiments.report.run_folder import to_json, write_whole
from experiments.tasks.decoding import Decoded, generation_of

if TYPE_CHECKING:
    from algorithms.runtime.request import Request

FOLDER = "baselines"


class BaselineStore:
    """Baselines in a folder that the rows of a sweep share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._asked: Counter[str] = Counter()

    def shared(
        self,
        plan: Plan,
        workload: Workload,
        asked: Sequence[Request],
        first_turns: bool,
        decode: Callable[[], Decoded],
    ) -> tuple[Decoded, bool]:
        """(what `decode` gives for `asked`, whether an earlier row got it)."""
        key = _key(plan, workload, asked, first_turns)
        self._asked[key] += 1
        path = self._folder / f"{key}-{self._asked[key]}.json"
        self._folder.mkdir(parents=True, exist_ok=True)
        with _alone(path.with_suffix(".lock")):
            if (found := _load(path)) is not None:
                return found, True
            decoded = decode()
            if len(decoded.timed.completions) == len(decoded.requests):  # a resumed run has times of a part only
                write_whole(path, to_json(_plain(decoded), indent=None))
            return decoded, False


def _key(plan: Plan, workload: Workload, asked: Sequence[Request], first_turns: bool) -> str:
    """What a decoding of the target alone depends on, as a hash."""
    config, hardware = plan.config, plan.hardware
    turns = None if first_turns else repr(workload.prompts.prompts)
    what = [[_plain_request(request) for request in asked], turns, workload.max_length]
    how = [str(plan.target.path), asdict(hardware), asdict(config.runtime), asdict(config.backend), plan.graph]
    return digest([what, how, machine(hardware.device), git_revision(), versions()])


def _plain_request(request: Request) -> dict[str, Any]:
    found = asdict(request)
    return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in found.items()}


def _plain(decoded: Decoded) -> dict[str, Any]:
    """A decoding as JSON takes it."""
    found = {item.name: getattr(decoded, item.name) for item in fields(decoded) if item.name != "timed"}
    requests = [_plain_request(request) for request in decoded.requests]
    return found | {"requests": requests, "generation": asdict(decoded.generation)}


def _load(path: Path) -> Decoded | None:
    """A stored decoding; None where there is none, or where it is broken."""
    from algorithms.runtime.request import Completion

    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    figures = found.pop("generation")
    generation = generation_of(figures, [Completion(**completion) for completion in figures["completions"]])
    requests = [_request(each) for each in found.pop("requests")]
    return Decoded(**found, requests=requests, generation=generation, timed=generation)


def _request(plain: dict[str, Any]) -> Request:
    """The request that `_plain_request` gave, with the keys of mappings as the numbers that JSON made text of."""
    from algorithms.runtime.request import Request
    from algorithms.runtime.sampling_params import SamplingParams

    sampling = dict(plain["sampling"])
    sampling["logit_bias"] = {int(token): bias for token, bias in sampling["logit_bias"].items()}
    sets = {name: frozenset(plain[name]) for name in ("eos_token_ids", "stop_token_ids")}
    tuples = {name: tuple(value) for name, value in sampling.items() if isinstance(value, list)}
    own = {"prompt_ids": tuple(plain["prompt_ids"]), "sampling": SamplingParams(**sampling | tuples), **sets}
    return Request(**plain | own)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the lock `path` during the block, waiting for whoever holds it."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
