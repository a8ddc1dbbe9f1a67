"""The requests of a prompt set. A prompt that the target cannot serve is found before weights load."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from algorithms.engine.grammar import Grammars
from algorithms.engine.request import Request
from algorithms.frontend import make_request, request_seed
from algorithms.models.config import DecoderConfig
from algorithms.models.tokenizer import Tokenizer
from experiments.app.conversation import longest_turn
from experiments.app.errors import UserError
from experiments.app.grammars import compile_all, grammar_of
from experiments.app.schema import RunConfig
from experiments.data.prompts import Prompt, PromptSet


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
