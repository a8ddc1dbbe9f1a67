"""Conversations: each turn follows the answer to the previous turn and contains it."""

from collections.abc import Sequence
from dataclasses import replace

from algorithms.engine.request import Completion, Request
from algorithms.models.tokenizer import Tokenizer
from experiments.data.prompts import Prompt

SLACK_PER_TURN = 32  # tokens by which an answer may grow when its text is encoded again, and the markup around it


def longest_turn(prompt: Prompt, first: Request, tokenizer: Tokenizer) -> int:
    """A bound on the tokens of the last turn of `prompt`, all answers included; `first` is its first turn."""
    answered = prompt.num_turns - 1
    if not answered:
        return first.max_length
    empty = len(prompt.encode(tokenizer, [""] * answered))
    return empty + prompt.num_turns * first.sampling.max_new_tokens + answered * SLACK_PER_TURN


class Conversations:
    """Makes the later turns of `prompts` while `asked` is served: what `Engine.generate` calls with each completion.

    Request i of `asked` is the first turn of prompt i, counted modulo the number of prompts. Turn t of it has the
    number i + t * len(asked), and a seed of its own. A conversation ends before a turn of more than `max_length`
    tokens, prompt and answer: an answer may have more tokens when its text is encoded again.
    """

    def __init__(
        self, prompts: Sequence[Prompt], asked: Sequence[Request], tokenizer: Tokenizer, max_length: int | None = None
    ) -> None:
        self._prompts, self._count, self._tokenizer, self._max_length = prompts, len(asked), tokenizer, max_length
        self.num_too_long = 0
        """Conversations that ended because their next turn was too long."""
        self._asked = {request.id: request for request in asked}
        self._replies: dict[int, list[str]] = {}

    @property
    def num_requests(self) -> int:
        """Requests that there will be in all."""
        return sum(self._prompt(first).num_turns for first in range(self._count))

    @property
    def requests(self) -> list[Request]:
        """All requests so far, by number."""
        return [self._asked[number] for number in sorted(self._asked)]

    def __call__(self, completion: Completion) -> Request | None:
        """The turn that follows `completion`; None after the last one, after a failed
        request, and where it would be too long."""
        number = completion.request_id
        turn, first = divmod(number, self._count)
        prompt = self._prompt(first)
        if turn + 1 == prompt.num_turns or completion.error:
            return None
        replies = self._replies.setdefault(first, [])
        replies.append(completion.text)
        request = self._asked[number]
        follow = replace(
            request.with_sampling(seed=request.sampling.seed + len(self._prompts)),
            id=number + self._count,
            prompt_ids=tuple(prompt.encode(self._tokenizer, replies)),
        )
        if self._max_length is not None and follow.max_length > self._max_length:
            self.num_too_long += 1
            return None
        self._asked[follow.id] = follow
        return follow

    def _prompt(self, first: int) -> Prompt:
        return self._prompts[first % len(self._prompts)]
