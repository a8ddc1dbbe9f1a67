"""Later turns of a conversation see the answers before them, and are asked when these have ended."""

from collections.abc import Sequence

from algorithms.engine.request import Completion, Request
from experiments.app.workload import SLACK_PER_TURN, Conversations, longest_turn
from experiments.data.prompts import Prompt
from tests.algorithms.toy import Setup, answers, autoregressive, engine_of, random_target, spell


class Letters:
    """Encodes and decodes as `toy.spell`; a turn is marked by token 1, a reply by token 2."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("0") for letter in text]

    def encode_chat(self, turns: Sequence[str], replies: Sequence[str] = ()) -> list[int]:
        found = [1, *self.encode(turns[0])]
        for reply, turn in zip(replies, turns[1:], strict=True):
            found += [2, *self.encode(reply), 1, *self.encode(turn)]
        return found


PROMPTS = (Prompt.of_turns(("57", "9", "34"), None), Prompt("68"), Prompt.of_turns(("7", "88"), None))


def test_the_engine_asks_each_turn_when_the_one_before_has_ended() -> None:
    target, tokens = random_target(), 5
    first = [Request(i, tuple(prompt.encode(Letters()))) for i, prompt in enumerate(PROMPTS)]
    asked = [request.with_sampling(max_new_tokens=tokens, seed=request.id) for request in first]
    talks = Conversations(PROMPTS, asked, Letters())
    setup = Setup(backend="torch", max_batch=2, max_length=longest_turn(PROMPTS[0], asked[0], Letters()))
    ended = engine_of(autoregressive(target), setup, target).generate(asked, follow=talks).completions
    assert [c.request_id for c in ended] == [0, 1, 2, 3, 5, 6] and talks.num_requests == 6
    assert [PROMPTS[r.id % 3].turn(r.id // 3) for r in talks.requests] == ["57", "68", "7", "9", "88", "34"]
    said = {c.request_id: spell(c.token_ids) for c in ended}
    last = talks.requests[-1]
    assert list(last.prompt_ids) == Letters().encode_chat(("57", "9", "34"), (said[0], said[3]))
    assert answers(talks.requests, setup, target) == [c.token_ids for c in ended]
    assert len({request.sampling.seed for request in talks.requests}) == 6
    assert len(last.prompt_ids) + tokens <= setup.max_length - 2 * SLACK_PER_TURN + 4


def test_a_failed_turn_ends_the_conversation() -> None:
    asked = [Request(i, (1, 5)) for i in range(3)]
    talks = Conversations(PROMPTS, asked, Letters())
    assert talks(Completion(0, finish_reason="error", error="no finite logit")) is None
    assert talks(Completion(1)) is None
    assert talks(Completion(2, text="4")).prompt_ids == (1, 7, 2, 4, 1, 8, 8)


def test_a_turn_that_is_too_long_ends_its_conversation_alone() -> None:
    """An answer may grow when it is encoded again; the engine refuses a turn beyond its context."""
    asked = [Request(i, (1, 5)).with_sampling(max_new_tokens=4) for i in range(3)]
    talks = Conversations(PROMPTS, asked, Letters(), 14)
    assert talks(Completion(0, text="4" * 9)) is None and talks.num_too_long == 1
    follow = talks(Completion(2, text="4"))
    assert follow is not None and follow.max_length == 11
    assert [request.id for request in talks.requests] == [0, 1, 2, 5]
