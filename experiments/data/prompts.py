"""Prompt sets by name, as the configuration group `data` offers them.

A set is a configuration dataclass whose `load` makes the prompts. The command line imports this module before anything
is checked, so it imports no torch, and imports the generators only when a set is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, make_dataclass, replace
from typing import Protocol

from omegaconf import MISSING

from experiments.data.prompt_files import DataError, Record, read_records
from experiments.data.public import PUBLIC_SETS, read_public

__all__ = ["DataConfig", "DataError", "Prompt", "PromptSet", "datasets", "load_prompts"]


class Encoder(Protocol):
    """What encoding a prompt needs of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, turns: Sequence[str]) -> list[int]: ...


@dataclass(frozen=True)
class Prompt:
    """One request's input."""

    text: str
    """What is shown, and what is encoded where there are no `turns`."""
    turns: tuple[str, ...] | None = None
    """User turns of a conversation, in order, with no replies in between."""
    raw: bool = False
    """Encode `text` as it stands, without the chat template."""
    answer: str | None = None
    stop_strings: tuple[str, ...] = ()
    where: str = ""
    """Place in a file, as `file:line`."""

    def encode(self, tokenizer: Encoder) -> list[int]:
        """Token ids of the prompt, up to where the model is to continue."""
        return tokenizer.encode(self.text) if self.raw else tokenizer.encode_chat(self.turns or (self.text,))

    @classmethod
    def of_turns(cls, turns: tuple[str, ...], answer: str | None) -> Prompt:
        """The user turns of a conversation, shown as one text."""
        return cls("\n\n".join(turns), turns=turns, answer=answer)


Score = Callable[[Prompt, str], bool]


@dataclass(frozen=True)
class PromptSet:
    """Prompts in order."""

    name: str
    prompts: tuple[Prompt, ...]
    score: Score | None = None
    """(prompt, generated text) to right or wrong; None where no answers are known."""


@dataclass
class DataConfig:
    """Common to all sets: `limit` keeps the first prompts, None all of them. `skip_long` leaves out those that are too
    long for the model, instead of refusing the run."""

    name: str = MISSING
    limit: int | None = None
    skip_long: bool = False

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"data.limit must be at least 1, or null for all prompts, got {self.limit}")

    def load(self) -> PromptSet:
        """All prompts of the set, or at least the first `limit`. Raises DataError where its source cannot be used."""
        raise NotImplementedError


@dataclass
class ArithmeticData(DataConfig):
    """200 held-out word problems with answers that a program checks."""

    name: str = "arithmetic"

    def load(self) -> PromptSet:
        from experiments.data.arithmetic import HELDOUT_COUNT, heldout_problems, parse_answer

        def score(prompt: Prompt, text: str) -> bool:
            return str(parse_answer(text)) == prompt.answer

        problems = heldout_problems(min(self.limit or HELDOUT_COUNT, HELDOUT_COUNT))
        prompts = tuple(Prompt(problem.question, answer=str(problem.answer)) for problem in problems)
        return PromptSet(self.name, prompts, score)


@dataclass
class CodeData(DataConfig):
    """64 beginnings of functions from standard-library modules that are kept out of training."""

    name: str = "code"

    def load(self) -> PromptSet:
        from experiments.data.code import DEFAULT_COUNT, function_beginnings

        beginnings = function_beginnings(min(self.limit or DEFAULT_COUNT, DEFAULT_COUNT))
        return PromptSet(self.name, tuple(Prompt(item.prompt, raw=True) for item in beginnings))


@dataclass
class JsonlData(DataConfig):
    """A file with one `{"prompt": "..."}` or `{"turns": ["...", ...]}` per line; `raw` skips the chat template."""

    name: str = "jsonl"
    path: str = MISSING
    raw: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path in ("", MISSING):
            raise ValueError("data.path: expected a .jsonl file, got none")

    def load(self) -> PromptSet:
        records = read_records(self.path)
        return PromptSet(self.name, tuple(replace(_file_prompt(r, self.raw), where=r.where) for r in records))


@dataclass
class TextData(DataConfig):
    """One prompt from the command line; `raw` skips the chat template."""

    name: str = "prompt"
    text: str = MISSING
    raw: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text == MISSING or not self.text.strip():
            raise ValueError("data.text: expected the text of the prompt, got none")

    def load(self) -> PromptSet:
        return PromptSet(self.name, (Prompt(self.text, raw=self.raw),))


@dataclass
class PublicData(DataConfig):
    """A public set in its published fields: from the local file `path`, or from the hub where `path` is None."""

    path: str | None = None

    def load(self) -> PromptSet:
        source = PUBLIC_SETS[self.name]
        records = read_public(self.name, self.path)
        prompts = tuple(Prompt.of_turns(source.turns(record), source.answer(record)) for record in records)
        if source.correct is None:
            return PromptSet(self.name, prompts)
        correct = source.correct
        return PromptSet(self.name, prompts, lambda prompt, text: correct(prompt.answer or "", text))


SETS: tuple[type[DataConfig], ...] = (
    ArithmeticData,
    CodeData,
    JsonlData,
    TextData,
    *(make_dataclass(f"{name}_data", [("name", str, name)], bases=(PublicData,)) for name in PUBLIC_SETS),
)


def datasets() -> dict[str, type[DataConfig]]:
    """Configuration classes of all sets by name."""
    return {kind.name: kind for kind in SETS}


def load_prompts(config: DataConfig) -> PromptSet:
    """The prompts that `config` asks for, at most `config.limit`. Raises DataError naming what cannot be used."""
    loaded = config.load()
    return replace(loaded, prompts=loaded.prompts[: config.limit])


def _file_prompt(record: Record, raw: bool) -> Prompt:
    present = [key for key in ("prompt", "turns") if key in record.fields]
    if len(present) != 1:
        found = ", ".join(map(repr, record.fields)) or "no key"
        raise DataError(f"{record.where}: expected either key 'prompt' or key 'turns', got {found}")
    answer = record.fields.get("answer")
    if answer is not None and not isinstance(answer, (str, int, float)):
        raise DataError(f"{record.where}: key 'answer': expected a string or a number, got {answer!r}")
    answer = None if answer is None else str(answer)
    if present == ["prompt"]:
        return Prompt(record.text("prompt"), raw=raw, answer=answer)
    if raw:
        raise DataError(f"{record.where}: 'turns' need the chat template; leave data.raw=false, or use key 'prompt'")
    return Prompt.of_turns(record.texts("turns"), answer)
