"""What an interrupted run has left of its decodings, and what is written so that a later run can go on.

requests.jsonl has the requests of the first round of each decoding, as they ended. decodings.jsonl has the times of
each round that was finished, and what did it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.app.conversation import Conversations
from experiments.report.run_folder import RunFolder
from experiments.tasks.decoding import Decoded, generation_of

if TYPE_CHECKING:
    from algorithms.runtime.request import Completion, Request

NOT_KEPT = ("requests", "generation", "timed")
"""Fields of `Decoded` that are put together from elsewhere."""


class Key(NamedTuple):
    """Names one decoding of a run."""

    data: str
    method: str
    round: int = 0

    def fits(self, entry: Mapping[str, Any]) -> bool:
        """Whether `entry` of a log is of this decoding."""
        return (entry["data"], entry["method"], entry.get("round", self.round)) == self


def record(folder: RunFolder, key: Key, completion: Completion) -> None:
    """Put a request that has ended on disk; later rounds write the same texts again."""
    if key.round == 0:
        # A clock runs meanwhile, and nobody changes a completion of a request that has ended: no deep copy.
        figures = {item.name: getattr(completion, item.name) for item in fields(completion)}
        folder.record({"data": key.data, "method": key.method, "id": figures.pop("request_id"), **figures})


def finished(folder: RunFolder, key: Key) -> dict[int, Completion]:
    """The requests that had ended before, by number."""
    from algorithms.runtime.request import Completion

    names = {item.name for item in fields(Completion)} - {"request_id"}
    found = (entry for entry in folder.requests.entries if key._replace(round=0).fits(entry))
    return {
        entry["id"]: Completion(entry["id"], **{name: entry[name] for name in names if name in entry})
        for entry in found
    }


def forget(folder: RunFolder, key: Key) -> None:
    """Drop the requests of a decoding that has to begin again."""
    folder.replace_requests([entry for entry in folder.requests.entries if not key.fits(entry)])


def keep(folder: RunFolder, key: Key, decoded: Decoded) -> None:
    """Put the times of a decoding that is finished on disk."""
    figures = {f.name: getattr(decoded, f.name) for f in fields(decoded) if f.name not in NOT_KEPT}
    times = asdict(replace(decoded.timed, completions=[]))
    seen = {completion.request_id for completion in decoded.timed.completions}
    decoding = {**figures, "compiled": list(decoded.compiled), "times": times, "timed_requests": sorted(seen)}
    folder.decodings.append({**key._asdict(), **decoding})


def take_over(folder: RunFolder, key: Key, decoded: Decoded) -> None:
    """Put a decoding that another run made on disk."""
    if folder.resumed and key.round == 0:
        forget(folder, key)
    for completion in decoded.generation.completions:
        record(folder, key, completion)
    keep(folder, key, decoded)


def still_to_do(
    asked: Sequence[Request], ended: Mapping[int, Completion], conversations: Conversations | None
) -> list[Request]:
    """The requests of `asked` that have not ended, and the next turns of conversations whose last turn has."""
    rest = [request for request in asked if request.id not in ended]
    follow = [conversations(ended[number]) for number in sorted(ended)] if conversations else []
    return rest + [request for request in follow if request is not None and request.id not in ended]


def restored(
    folder: RunFolder, key: Key, asked: Sequence[Request], conversations: Conversations | None
) -> Decoded | None:
    """The decoding as it was finished before; None if it was not."""
    entry = next((entry for entry in folder.decodings.entries if key.fits(entry)), None)
    if entry is None:
        return None
    done = finished(folder, key)
    if still_to_do(asked, done, conversations):
        return None
    requests = conversations.requests if conversations else asked
    figures = {f.name: entry[f.name] for f in fields(Decoded) if f.name not in NOT_KEPT}
    completions = [done[request.id] for request in requests]
    whole = generation_of(entry["times"], completions)
    timed = set(entry["timed_requests"])
    part = replace(whole, completions=[c for c in completions if c.request_id in timed])
    return Decoded(requests=requests, generation=whole, timed=part, **figures)
