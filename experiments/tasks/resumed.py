"""Records of decodings, from which a later run resumes and jobs of a sweep share a baseline.

requests.jsonl has the requests of the first round of each decoding, as they ended. decodings.jsonl has the times of
each round that was finished, and what did it.

Jobs of a sweep share decodings of the target alone: one for each target, prompts, sampling and runtime. The first job
that needs one decodes and stores it; jobs that need it meanwhile wait. Another machine, revision or version of a
package decodes anew.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from algorithms.engine.request import Completion
from algorithms.engine.session import Generation
from algorithms.step.runner import GraphReport
from experiments.app.files import locked, read_object, to_json, write_whole
from experiments.app.identity import digest
from experiments.app.plan import Plan
from experiments.app.provenance import measured_on
from experiments.app.workload import Conversations, Workload
from experiments.report.run_folder import RunFolder
from experiments.tasks.decoding import Decoded

NOT_KEPT = ("requests", "generation", "timed")  # fields of `Decoded` that are put together from elsewhere


class Key(NamedTuple):
    """Names one decoding of a run."""

    data: str
    method: str
    round: int = 0

    def fits(self, entry: Mapping[str, Any]) -> bool:
        """Whether `entry` of a log is of this decoding."""
        return (entry["data"], entry["method"], entry.get("round", self.round)) == self


def request_entry(key: Key, completion: Completion) -> dict[str, Any]:
    """The line of requests.jsonl."""
    # A clock runs meanwhile, and nobody changes a completion of a request that has ended: no deep copy.
    figures = {item.name: getattr(completion, item.name) for item in fields(completion)}
    return {"data": key.data, "method": key.method, "id": figures.pop("request_id"), **figures}


def decoding_entry(key: Key, decoded: Decoded) -> dict[str, Any]:
    """The line of decodings.jsonl."""
    figures = {f.name: getattr(decoded, f.name) for f in fields(decoded) if f.name not in NOT_KEPT}
    times = asdict(replace(decoded.timed, completions=[]))
    seen = sorted({completion.request_id for completion in decoded.timed.completions})
    return {**key._asdict(), **figures, "compiled": list(decoded.compiled), "times": times, "timed_requests": seen}


def completions(entries: Iterable[Mapping[str, Any]]) -> dict[int, Completion]:
    """The requests of `request_entry`, by number."""
    names = {item.name for item in fields(Completion)} - {"request_id"}
    return {e["id"]: Completion(e["id"], **{name: e[name] for name in names if name in e}) for e in entries}


def rebuilt(entry: Mapping[str, Any], done: Mapping[int, Completion], conversations: Conversations) -> Decoded | None:
    """The decoding of `decoding_entry`, whose requests ended as `done`; None where one did not."""
    if conversations.still_to_do(done):
        return None
    requests = conversations.requests
    figures = {f.name: entry[f.name] for f in fields(Decoded) if f.name in entry and f.name not in NOT_KEPT}
    ended, seen, times = [done[request.id] for request in requests], set(entry["timed_requests"]), entry["times"]
    graphs: Any = {name: tuple(v) if isinstance(v, list) else v for name, v in times["graphs"].items()}
    whole = Generation(**{**times, "graphs": GraphReport(**graphs), "completions": ended})
    part = replace(whole, completions=[completion for completion in ended if completion.request_id in seen])
    return Decoded(requests=requests, generation=whole, timed=part, **figures)


def record(folder: RunFolder, key: Key, completion: Completion) -> None:
    """Put a request that has ended on disk; later rounds produce the same outputs again."""
    if key.round == 0:
        folder.record(request_entry(key, completion))


def finished(folder: RunFolder, key: Key) -> dict[int, Completion]:
    """The requests of the decoding that had ended before, by number."""
    return completions(entry for entry in folder.requests.entries if key._replace(round=0).fits(entry))


def drop(folder: RunFolder, key: Key) -> None:
    """Drop the requests of a decoding that has to begin again."""
    folder.requests.replace([entry for entry in folder.requests.entries if not key.fits(entry)])


def drop_unless_together(folder: RunFolder, data: str, methods: Sequence[str]) -> None:
    """Drop the decodings of `methods` on `data` unless one process decoded a round of all of them: the times of two
    processes do not compare."""
    of_methods = [e for e in folder.decodings.entries if e["data"] == data and e["method"] in methods]
    first = [entry for entry in of_methods if entry["round"] == 0]
    if len(first) == len(methods) and len({entry["process"] for entry in first}) == 1:
        return
    folder.decodings.replace([entry for entry in folder.decodings.entries if entry not in of_methods])
    for method in methods:
        drop(folder, Key(data, method))


def take_over(folder: RunFolder, key: Key, decoded: Decoded) -> None:
    """Put a decoding that another run made on disk."""
    if folder.resumed and key.round == 0:
        drop(folder, key)
    for completion in decoded.generation.completions:
        record(folder, key, completion)
    folder.decodings.append(decoding_entry(key, decoded))


def restored(folder: RunFolder, key: Key, conversations: Conversations) -> Decoded | None:
    """The decoding as it was finished before; None if it was not."""
    entry = next((entry for entry in folder.decodings.entries if key.fits(entry)), None)
    return rebuilt(entry, finished(folder, key), conversations) if entry else None


BASELINES = "baselines"


class BaselineStore:
    """Baselines in a folder that the jobs of a sweep share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._used: Counter[str] = Counter()

    def shared(
        self, plan: Plan, workload: Workload, conversations: Conversations, decode: Callable[[], Decoded]
    ) -> tuple[Decoded, bool]:
        """(the decoding of `conversations`, by `decode` unless it is stored; whether it was stored)."""
        config, hardware = plan.config, plan.hardware
        what = [list(conversations.first), list(conversations.prompts), workload.max_length]
        how = [str(plan.target.path), asdict(hardware), asdict(config.runtime), asdict(config.backend), plan.graph]
        name = digest([what, how, measured_on(hardware.device)])
        self._used[name] += 1
        path = self._folder / f"{name}-{self._used[name]}.json"
        self._folder.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock"), wait=True):
            stored = read_object(path)
            found = stored and rebuilt(stored["decoding"], completions(stored["requests"]), conversations)
            if found:
                return found, True
            decoded = decode()
            if decoded.whole:
                key = Key(workload.name, decoded.algo)
                entries = [request_entry(key, completion) for completion in decoded.generation.completions]
                write_whole(path, to_json({"decoding": decoding_entry(key, decoded), "requests": entries}, indent=None))
            return decoded, False
