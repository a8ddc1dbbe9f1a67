"""What must hold of an engine after every step of the fuzz."""

from algorithms.engine.engine import Engine
from algorithms.engine.request import Completion
from algorithms.engine.scheduler import Scheduler
from algorithms.engine.session import Session

CANARY = 777.0


class Free(list[int]):
    """A list of free pages that notes which were taken."""

    def __init__(self, pages: list[int]) -> None:
        super().__init__(pages)
        self.taken: set[int] = set()

    def pop(self, *place: int) -> int:
        self.taken.add(page := super().pop(*place))
        return page


class Canaries:
    """Values in the free pages of an engine, which show a write to a page without an owner."""

    def __init__(self, engine: Engine) -> None:
        self._scheduler, self._kv = engine.scheduler, engine.parts.memory.cache.kv
        self._marked: set[int] = set()

    def step(self, session: Session) -> list[Completion]:
        """A step of `session`, which may write to pages with an owner alone."""
        before, marked, self._marked = set(self._scheduler._free), self._marked, set()
        fresh = sorted(before - marked)
        if fresh:
            self._kv[:, :, fresh] = CANARY
        free = self._scheduler._free = Free(self._scheduler._free)
        ended = session.step()
        untouched = sorted(before - free.taken)
        assert bool((self._kv[:, :, untouched] == CANARY).all()), "a free page was written"
        self._marked = set(untouched)
        return ended


def check_pages(scheduler: Scheduler) -> None:
    """Every page is free or owned once."""
    free = scheduler._free
    owned = [page for running in scheduler.admitted for page in running.pages]
    assert len(set(owned)) == len(owned), "a page has two owners"
    assert sorted([*free, *owned]) == list(range(scheduler.num_pages)), "a page is lost, or free and owned"


def check_rows(engine: Engine, early: bool) -> None:
    """What the device holds of the running requests is what the host knows; `early`: no step is in flight."""
    state, rows = engine.parts.state, engine.scheduler.running
    assert [running.slot for running in rows] == list(range(len(rows)))
    assert state.active.tolist() == [1] * len(rows) + [0] * (state.max_batch - len(rows))
    lengths, history, last_tokens = state.lengths.tolist(), state.history.tolist(), state.last_tokens.tolist()
    for running in rows:
        text = [*running.request.prompt_ids, *running.completion.token_ids]
        assert running.length == len(text) - 1
        assert history[running.slot][: len(text)] == text
        assert state.page_table[running.slot, : len(running.pages)].tolist() == running.pages
        assert not running.completion.finish_reason
        if early:
            assert (lengths[running.slot], last_tokens[running.slot]) == (running.length, text[-1])
        else:
            assert lengths[running.slot] >= running.length


def check_counts(completion: Completion, depth: int, logprobs: bool) -> None:
    """Tokens, accepted drafts and log-probabilities of an answer fit together."""
    emitted = sum(accepted + 1 for accepted in completion.accepted_counts)
    assert len(completion.token_ids) == emitted - completion.num_truncated
    assert len(completion.logprobs) == (len(completion.token_ids) if logprobs else 0)
    assert all(0 <= accepted <= depth for accepted in completion.accepted_counts)
    assert len(completion.emitted_at_ms) == len(completion.accepted_counts)
