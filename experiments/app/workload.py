"""The requests of a prompt set. A prompt that the target cannot serve is found before weights load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from algorithms.runtime.sampling_params import GrammarParams
from experiments.app.conversation import longest_turn
from experiments.app.errors import UserError
from experiments.app.grammars import compile_all, from_files, of_row
from experiments.app.schema import SEED_STRIDE, RunConfig
from experiments.data.prompts import Prompt, PromptSet

if TYPE_CHECKING:
    from algorithms.runtime.grammar import Grammars
    from algorithms.runtime.models.config import DecoderConfig
    from algorithms.runtime.models.tokenizer import Tokenizer
    from algorithms.runtime.request import Request


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
    markup: str
    """How prompts become text: the chat template and its thinking mode."""
    notes: tuple[str, ...] = ()
    """What a reader must know of the choice of the prompts."""
    grammars: Grammars | None = None
    """Compiles the grammars of the requests; None if they have none."""

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
    from algorithms.runtime.request import Request

    sampling = config.sampling
    return tuple(
        Request(
            id=index,
            prompt_ids=tuple(prompt.encode(tokenizer)),
            sampling=replace(
                sampling,
                seed=sampling.seed * SEED_STRIDE + index,
                grammar=_grammar(prompt, config, f"prompt {index + 1}"),
                stop_strings=(*prompt.stop_strings, *sampling.stop_strings),
                bad_words=_encoded(sampling.bad_words, tokenizer),
            ),
            eos_token_ids=tokenizer.eos_ids,
        )
        for index, prompt in enumerate(prompts.prompts)
    )


def _grammar(prompt: Prompt, config: RunConfig, place: str) -> GrammarParams:
    """The grammar of a prompt. Raises UserError that names its place where it is not one."""
    asked = config.sampling.grammar
    if prompt.grammar is None:
        return from_files(asked)
    try:
        return of_row(prompt.grammar, asked)
    except UserError as error:
        raise UserError(f"{prompt.where or place}: {error}") from error


def _encoded(words: Sequence[str | tuple[int, ...]], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Bad words as token ids. A string is forbidden as the tokenizer writes it, alone and behind a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if isinstance(word, str):
            forms = (word, " " + word.lstrip())
            found |= dict.fromkeys(tuple(tokenizer.encode(form, add_special=False)) for form in forms)
        else:
            found[word] = None
    return tuple(found)


def make_workload(
    config: RunConfig, data: Any, prompts: PromptSet, tokenizer: Tokenizer, target: DecoderConfig
) -> Workload:
    """The requests of one prompt set. A prompt that is too long is refused, or left out with `data.skip_long`.

    Raises UserError that names the prompt by its number, which counts from 1.
    """
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
    notes = (_left_out(prompts.name, long, len(entries), context),) if long else ()
    kept = replace(prompts, prompts=tuple(entry.prompt for entry in short))
    renumbered = tuple(replace(entry.request, id=index) for index, entry in enumerate(short))
    grammars = compile_all(
        renumbered, tokenizer, target.vocab_size, lambda r: f"data={prompts.name}: {_place(short[r.id], len(entries))}"
    )
    longest = max(entry.length for entry in short)
    return Workload(kept, renumbered, longest, _markup(config, kept, tokenizer), notes, grammars)


def _markup(config: RunConfig, prompts: PromptSet, tokenizer: Tokenizer) -> str:
    """What to call the chat template and its thinking mode."""
    if tokenizer.template is None or all(prompt.raw for prompt in prompts.prompts):
        return "no template"
    modes = {None: "as the template has it", True: "on", False: "off"}
    return tokenizer.template + (f", thinking: {modes[config.model.thinking]}" if tokenizer.can_think else "")


def _left_out(name: str, long: Sequence[Entry], count: int, context: int) -> str:
    numbers = ", ".join(str(entry.number) for entry in long[:10]) + (", …" if len(long) > 10 else "")
    return f"{len(long)} of {count} prompts of {name} were left out, too long for {context:,} tokens: {numbers}"


def _place(entry: Entry, count: int) -> str:
    return f"prompt {entry.number} of {count}" + (f" ({entry.prompt.where})" if entry.prompt.where else "")


def _too_long(
    name: str,
    long: Sequence[Entry],
    count: int,
    context: int,
    config: RunConfig,
    skip_key: str | None,
) -> str:
    """The message for prompts that do not fit; `skip_key` is the setting that would leave them out."""
    first = long[0]
    new, bound = first.request.sampling.max_new_tokens, "the model's context"
    if config.runtime.max_length is not None and config.runtime.max_length == context:
        bound = "runtime.max_length"
    answers = "new tokens" if first.prompt.num_turns == 1 else f"new tokens for each of {first.prompt.num_turns} turns"
    lines = [
        f"data={name}: {_place(first, count)} is too long: {first.length - new * first.prompt.num_turns:,} tokens "
        f"+ {new:,} {answers} (sampling.max_new_tokens) = {first.length:,}, {bound} is {context:,}"
    ]
    lines += [f"{len(long)} of {count} prompts are too long"] if len(long) > 1 else []
    lines.append(f"shorten {'them' if len(long) > 1 else 'it'}, or lower sampling.max_new_tokens")
    if skip_key:
        lines[-1] += f", or leave out such prompts with {skip_key}=true"
    return "\n".join(lines)
