"""The requests of a prompt set, their grammars, and the later turns of conversations, each of which follows the answer
to the previous turn and contains it. A prompt that the target cannot serve is found before weights load."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from algorithms.engine.grammar import GrammarError, Grammars
from algorithms.engine.request import Completion, Request
from algorithms.frontend import make_request, request_seed
from algorithms.models.config import DecoderConfig
from algorithms.models.tokenizer import Tokenizer
from algorithms.step.sampling_params import GRAMMARS, GrammarParams
from experiments.app.errors import UserError
from experiments.app.schema import RunConfig
from experiments.data.prompts import Prompt, PromptSet

SLACK_PER_TURN = 32  # tokens by which an answer may grow when its text is encoded again, and the markup around it
FILE = "@"  # on the command line a grammar that begins so is the name of a file; one that begins with two is text


def grammar_of(own: Mapping[str, Any] | None, params: GrammarParams, place: str = "") -> GrammarParams:
    """The grammar of a prompt: its `own`, always as text, with the other settings of `params`, or `params`, with the
    text of the file where the grammar is `@FILE`, and `@…` where it is `@@…`. Raises UserError where the file cannot be
    read, and that names the prompt's `place` where `own` is no grammar."""
    if own is None:
        return _from_file(params) if params.text.startswith(FILE) else params
    known = [item.name for item in fields(GrammarParams)]
    if unknown := [key for key in own if key not in known]:
        raise UserError(f"{place}: key 'grammar': expected {', '.join(known)}, got {unknown[0]!r}")
    changes: dict[str, Any] = dict.fromkeys(GRAMMARS) | dict(own)
    try:
        return replace(params, **changes)
    except ValueError as error:
        raise UserError(f"{place}: key 'grammar': {error}") from error


def _from_file(params: GrammarParams) -> GrammarParams:
    text = params.text.removeprefix(FILE)
    if not text.startswith(FILE):
        try:
            text = Path(text).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise UserError(f"sampling.grammar.{params.kind}: {text}: cannot be read: {reason}") from error
    changes: dict[str, Any] = {str(params.kind): text}
    return replace(params, **changes)


def compile_all(
    requests: Sequence[Request], tokenizer: Tokenizer, vocab_size: int, place: Callable[[Request], str]
) -> Grammars | None:
    """A compiler that has compiled what `requests` need; None if they need none. Raises UserError that names the place
    of the first request whose grammar cannot be compiled."""
    constrained = [request for request in requests if request.sampling.constrained]
    if not constrained:
        return None
    try:
        grammars = Grammars.of_tokenizer(tokenizer, vocab_size)
    except GrammarError as error:
        raise UserError(str(error)) from error
    for request in constrained:
        try:
            grammars.matcher(request.sampling.grammar, request.ends)
        except GrammarError as error:
            raise UserError(f"{place(request)}: {error}") from error
    return grammars


def longest_turn(prompt: Prompt, first: Request, tokenizer: Tokenizer) -> int:
    """A bound on the tokens of the last turn of `prompt`, all answers included; `first` is its first turn."""
    answered = prompt.num_turns - 1
    if not answered:
        return first.max_length
    empty = len(prompt.encode(tokenizer, [""] * answered))
    return empty + prompt.num_turns * first.sampling.max_new_tokens + answered * SLACK_PER_TURN


class Conversations:
    """Makes the later turns of `prompts` while `asked` is served: what `Engine.generate` calls with each completion.
    Without `prompts` there are none.

    Request i of `asked` is the first turn of prompt i, counted modulo the number of prompts. Turn t of it has the
    number i + t * len(asked), and a seed of its own. A conversation ends before a turn of more than `max_length`
    tokens, prompt and answer: an answer may have more tokens when its text is encoded again.
    """

    def __init__(
        self, prompts: Sequence[Prompt], asked: Sequence[Request], tokenizer: Tokenizer, max_length: int | None = None
    ) -> None:
        self.prompts, self.first, self._tokenizer, self._max_length = prompts, asked, tokenizer, max_length
        self.num_too_long = 0
        """Conversations that ended because their next turn was too long."""
        self._asked = {request.id: request for request in asked}
        self._replies: dict[int, list[str]] = {}

    @property
    def num_requests(self) -> int:
        """Requests that there will be in all."""
        turns = [prompt.num_turns for prompt in self.prompts] or [1]
        return sum(turns[number % len(turns)] for number in range(len(self.first)))

    @property
    def requests(self) -> list[Request]:
        """All requests so far: the first turns, then the later ones by number."""
        later = sorted(set(self._asked) - {request.id for request in self.first})
        return [*self.first, *(self._asked[number] for number in later)]

    def still_to_do(self, ended: Mapping[int, Completion]) -> list[Request]:
        """The first turns that have not `ended`, and the next turns of conversations whose last turn has."""
        follow = filter(None, [self(ended[number]) for number in sorted(ended)])
        return [request for request in (*self.first, *follow) if request.id not in ended]

    def __call__(self, completion: Completion) -> Request | None:
        """The turn that follows `completion`; None after the last one, after a failed
        request, and where it would be too long."""
        if not self.prompts or completion.error:
            return None
        number, count = completion.request_id, len(self.first)
        turn, first = divmod(number, count)
        prompt = self.prompts[first % len(self.prompts)]
        if turn + 1 == prompt.num_turns:
            return None
        replies = self._replies.setdefault(first, [])
        replies.append(completion.text)
        request = self._asked[number]
        follow = replace(
            request.with_sampling(seed=request.sampling.seed + len(self.prompts)),
            id=number + count,
            prompt_ids=tuple(prompt.encode(self._tokenizer, replies)),
        )
        if self._max_length is not None and follow.max_length > self._max_length:
            self.num_too_long += 1
            return None
        self._asked[follow.id] = follow
        return follow


class Entry(NamedTuple):
    """One prompt: its number, from 1, its first request, and the tokens that it can reach."""

    number: int
    prompt: Prompt
    request: Request
    length: int


@dataclass(frozen=True)
class Workload:
    """One prompt set and its requests, one per prompt: of a conversation, the first turn."""

    prompts: PromptSet
    requests: tuple[Request, ...]
    max_length: int
    """Tokens that the longest request can reach, prompt and answer, later turns of conversations included."""
    markup: str  # how prompts become text: the chat template and its thinking mode
    notes: tuple[str, ...] = ()  # notes for a reader on the choice of the prompts
    grammars: Grammars | None = None  # compiles the grammars of the requests; None if they have none

    @property
    def name(self) -> str:
        return self.prompts.name

    @property
    def judge(self) -> Callable[[int, str], bool] | None:
        """(index, text) to right or wrong, None for a set without answers. Indices past the last prompt start over."""
        prompts, score = self.prompts.prompts, self.prompts.score
        return None if score is None else lambda index, text: score(prompts[index % len(prompts)], text)


def make_requests(config: RunConfig, prompts: PromptSet, tokenizer: Tokenizer) -> tuple[Request, ...]:
    """One request per prompt. Its seed depends on the run's seed and on its number, not on the batch."""
    sampling = config.sampling

    def request(index: int, prompt: Prompt) -> Request:
        own = replace(
            sampling,
            seed=request_seed(sampling.seed, index),
            grammar=grammar_of(prompt.grammar, sampling.grammar, prompt.where or f"prompt {index + 1}"),
            stop_strings=(*prompt.stop_strings, *sampling.stop_strings),
        )
        return make_request(index, prompt.encode(tokenizer), own, tokenizer)

    return tuple(request(index, prompt) for index, prompt in enumerate(prompts.prompts))


def make_workload(
    config: RunConfig, data: Any, prompts: PromptSet, tokenizer: Tokenizer, target: DecoderConfig
) -> Workload:
    """The requests of one prompt set. A prompt that is too long is refused, or left out with `data.skip_long`. Raises
    UserError that names the prompt by its number, which counts from 1."""
    requests = make_requests(config, prompts, tokenizer)
    context = min(config.runtime.max_length or target.max_position_embeddings, target.max_position_embeddings)
    entries = [
        Entry(number, prompt, request, longest_turn(prompt, request, tokenizer))
        for number, (prompt, request) in enumerate(zip(prompts.prompts, requests, strict=True), start=1)
    ]
    for entry in entries:
        if problem := entry.request.problem(target.vocab_size):
            raise UserError(f"data={prompts.name}: {_place(entry, len(entries))}: {problem}")
    short = [entry for entry in entries if entry.length <= context]
    long = [entry for entry in entries if entry.length > context]
    if long and (not data.skip_long or not short):
        key = "task.skip_long" if "data" in config.task.IGNORED else "data.skip_long"
        raise UserError(_too_long(prompts.name, long, len(entries), context, config, key if short else None))
    numbers = ", ".join(str(entry.number) for entry in long[:10]) + (", …" if len(long) > 10 else "")
    left_out = f"{len(long)} of {len(entries)} prompts of {prompts.name} were left out, too long for {context:,} tokens"
    kept = replace(prompts, prompts=tuple(entry.prompt for entry in short))
    renumbered = tuple(replace(entry.request, id=index) for index, entry in enumerate(short))
    grammars = compile_all(
        renumbered, tokenizer, target.vocab_size, lambda r: f"data={prompts.name}: {_place(short[r.id], len(entries))}"
    )
    longest = max(entry.length for entry in short)
    notes = (f"{left_out}: {numbers}",) if long else ()
    return Workload(kept, renumbered, longest, _markup(config, kept, tokenizer), notes, grammars)


def _markup(config: RunConfig, prompts: PromptSet, tokenizer: Tokenizer) -> str:
    """The name of the chat template with its thinking mode."""
    if tokenizer.template is None or all(prompt.raw for prompt in prompts.prompts):
        return "no template"
    modes = {None: "as the template has it", True: "on", False: "off"}
    return tokenizer.template + (f", thinking: {modes[config.model.thinking]}" if tokenizer.can_think else "")


def _place(entry: Entry, count: int) -> str:
    return f"prompt {entry.number} of {count}" + (f" ({entry.prompt.where})" if entry.prompt.where else "")


def _too_long(
    name: str, long: Sequence[Entry], count: int, context: int, config: RunConfig, skip_key: str | None
) -> str:
    """The message for prompts that do not fit; `skip_key` is the setting that would leave them out."""
    first = long[0]
    new, turns = first.request.sampling.max_new_tokens, first.prompt.num_turns
    bound = "runtime.max_length" if config.runtime.max_length == context else "the model's context"
    answers = "new tokens" if turns == 1 else f"new tokens for each of {turns} turns"
    lines = [
        f"data={name}: {_place(first, count)} is too long: {first.length - new * turns:,} tokens "
        f"+ {new:,} {answers} (sampling.max_new_tokens) = {first.length:,}, {bound} is {context:,}"
    ]
    lines += [f"{len(long)} of {count} prompts are too long"] if len(long) > 1 else []
    lines.append(f"shorten {'them' if len(long) > 1 else 'it'}, or lower sampling.max_new_tokens")
    if skip_key:
        lines[-1] += f", or leave out such prompts with {skip_key}=true"
    return "\n".join(lines)
