"""Decodings of the target alone that the jobs of a sweep share: one for each target, prompts, sampling and runtime.

The first job that needs one decodes and stores it; jobs that need it meanwhile wait. A run that decodes the same
baseline several times shares each repeat by its number. Another machine, revision or version of a package decodes anew.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from algorithms.engine.request import Request
from experiments.app.atomic_write import write_whole
from experiments.app.conversation import Conversations
from experiments.app.identity import digest
from experiments.app.locks import locked
from experiments.app.plan import Plan
from experiments.app.provenance import git_revision, machine, versions
from experiments.app.workload import Workload
from experiments.report.json_log import to_json
from experiments.tasks.decoding import Decoded
from experiments.tasks.resumed import Key, completions, decoding_entry, rebuilt, request_entry, still_to_do

FOLDER = "baselines"


class BaselineStore:
    """Baselines in a folder that the jobs of a sweep share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._used: Counter[str] = Counter()

    def shared(
        self,
        plan: Plan,
        workload: Workload,
        requests: Sequence[Request],
        conversations: Conversations | None,
        decode: Callable[[], Decoded],
    ) -> tuple[Decoded, bool]:
        """(the decoding of `requests`, by `decode` unless it is stored; whether it was stored)."""
        config, hardware = plan.config, plan.hardware
        what = [list(requests), workload.prompts.prompts if conversations else None, workload.max_length]
        how = [str(plan.target.path), asdict(hardware), asdict(config.runtime), asdict(config.backend), plan.graph]
        name = digest([what, how, machine(hardware.device), git_revision(), versions()])
        self._used[name] += 1
        path = self._folder / f"{name}-{self._used[name]}.json"
        self._folder.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock"), wait=True):
            if (found := _load(path, requests, conversations)) is not None:
                return found, True
            decoded = decode()
            if decoded.whole:
                key = Key(workload.name, decoded.algo)
                entries = [request_entry(key, completion) for completion in decoded.generation.completions]
                stored = {"decoding": decoding_entry(key, decoded), "requests": entries}
                write_whole(path, to_json(stored, indent=None))
            return decoded, False


def _load(path: Path, requests: Sequence[Request], conversations: Conversations | None) -> Decoded | None:
    """A stored decoding; None where there is none, or where it is broken."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    done = completions(found["requests"])
    still_to_do(requests, done, conversations)  # makes the later turns
    return rebuilt(found["decoding"], done, conversations.requests if conversations else requests)
