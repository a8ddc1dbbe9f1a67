"""The requests of a prompt set. A prompt that the target cannot serve is found before weights load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from experiments.app.errors import UserError
from experiments.app.schema import SEED_STRIDE, RunConfig
from experiments.data.prompts import Prompt, PromptSet

if TYPE_CHECKING:
    from algorithms.runtime.models.config import DecoderConfig
    from algorithms.runtime.models.tokenizer import Tokenizer
    from algorithms.runtime.request import Request


@dataclass(frozen=True)
class Workload:
    """One prompt set and its requests, one per prompt."""

    prompts: PromptSet
    requests: tuple[Request, ...]
    notes: tuple[str, ...] = ()
    """What a reader must know of the choice of the prompts."""

    @property
    def name(self) -> str:
        return self.prompts.name

    @property
    def max_length(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        return max(request.max_length for request in self.requests)

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
                stop_strings=(*prompt.stop_strings, *sampling.stop_strings),
            ),
            eos_token_ids=tokenizer.eos_ids,
        )
        for index, prompt in enumerate(prompts.prompts)
    )


def make_workload(
    config: RunConfig, data: Any, prompts: PromptSet, tokenizer: Tokenizer, target: DecoderConfig
) -> Workload:
    """The requests of one prompt set. A prompt that is too long is refused, or left out with `data.skip_long`.

    Raises UserError that names the prompt by its number, which counts from 1.
    """
    requests = make_requests(config, prompts, tokenizer)
    context = min(config.runtime.max_length or target.max_position_embeddings, target.max_position_embeddings)
    numbered = list(enumerate(zip(prompts.prompts, requests, strict=True), start=1))
    for number, (prompt, request) in numbered:
        if problem := request.problem(target.vocab_size):
            raise UserError(f"data={prompts.name}: {_place(prompt, number, len(numbered))}: {problem}")
    long = [entry for entry in numbered if entry[1][1].max_length > context]
    if not long:
        return Workload(prompts, requests)
    short = [entry for entry in numbered if entry not in long]
    if not data.skip_long or not short:
        key = "task.skip_long" if "data" in config.task.IGNORED else "data.skip_long"
        raise UserError(_too_long(prompts.name, long, len(numbered), context, config, key if short else None))
    left_out = ", ".join(str(number) for number, _ in long[:10]) + (", …" if len(long) > 10 else "")
    note = f"{len(long)} of {len(numbered)} prompts of {prompts.name} were left out, too long for {context:,} tokens"
    kept = replace(prompts, prompts=tuple(prompt for _, (prompt, _) in short))
    renumbered = tuple(replace(request, id=index) for index, (_, (_, request)) in enumerate(short))
    return Workload(kept, renumbered, (f"{note}: {left_out}",))


def _place(prompt: Prompt, number: int, count: int) -> str:
    return f"prompt {number} of {count}" + (f" ({prompt.where})" if prompt.where else "")


def _too_long(
    name: str,
    long: Sequence[tuple[int, tuple[Prompt, Request]]],
    count: int,
    context: int,
    config: RunConfig,
    skip_key: str | None,
) -> str:
    """The message for prompts that do not fit; `skip_key` is the setting that would leave them out."""
    number, (prompt, request) = long[0]
    new, bound = request.sampling.max_new_tokens, "the model's context"
    if config.runtime.max_length is not None and config.runtime.max_length == context:
        bound = "runtime.max_length"
    lines = [
        f"data={name}: {_place(prompt, number, count)} is too long: {len(request.prompt_ids):,} tokens "
        f"+ {new:,} new tokens (sampling.max_new_tokens) = {request.max_length:,}, {bound} is {context:,}"
    ]
    lines += [f"{len(long)} of {count} prompts are too long"] if len(long) > 1 else []
    lines.append(f"shorten {'them' if len(long) > 1 else 'it'}, or lower sampling.max_new_tokens")
    if skip_key:
        lines[-1] += f", or leave out such prompts with {skip_key}=true"
    return "\n".join(lines)
