"""Prompt sets by name, as the configuration group `data` offers them.

A set is a configuration dataclass whose `load` makes the prompts. The command line imports this module before anything
is checked, so it imports no torch, and imports the generators only when a set is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from omegaconf import MISSING

from experiments.data.prompt_files import DataError, Record, read_records
from experiments.data.public import PUBLIC_SETS, read_public
from specdec_kernels.checks import expect_at_least

__all__ = ["DataConfig", "DataError", "JsonlData", "Prompt", "PromptSet", "datasets", "load_prompts"]

SHIPPED = Path(__file__).parent
"""Where the prompt files of this project are."""


class Encoder(Protocol):
    """What encoding a prompt needs of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, turns: Sequence[str], replies: Sequence[str] = ()) -> list[int]: ...


@dataclass(frozen=True)
class Prompt:
    """The input of one request, or of several in a row: the turns of a conversation."""

    text: str
    """What is shown, and what is encoded where there are no `turns`."""
    turns: tuple[str, ...] | None = None
    """User turns of a conversation, in order. Each is asked when the one before has been answered."""
    raw: bool = False
    """Encode `text` as it stands, without the chat template."""
    answer: str | None = None
    stop_strings: tuple[str, ...] = ()
    where: str = ""
    """Place in a file, as `file:line`."""
    category: str | None = None
    """What kind of prompt this is, in sets that name kinds."""
    grammar: Mapping[str, Any] | None = None
    """What the answer must be, as `sampling.grammar` has it, in place of that; None leaves it to that."""

    @property
    def num_turns(self) -> int:
        """Requests that this prompt becomes."""
        return len(self.turns) if self.turns else 1

    def turn(self, number: int) -> str:
        """The text of the turn `number`, from 0."""
        return self.turns[number] if self.turns else self.text

    def encode(self, tokenizer: Encoder, replies: Sequence[str] = ()) -> list[int]:
        """Token ids of the turn behind `replies`, with all before it, up to where the model is to continue."""
        if self.raw:
            return tokenizer.encode(self.text)
        return tokenizer.encode_chat((self.turns or (self.text,))[: len(replies) + 1], replies)

    @classmethod
    def of_turns(cls, turns: tuple[str, ...], answer: str | None, category: str | None = None) -> Prompt:
        """A conversation, shown as one text."""
        return cls("\n\n".join(turns), turns=turns, answer=answer, category=category)


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
    long for the model, instead of refusing the run. `category` keeps the prompts of one kind."""

    name: str = MISSING
    limit: int | None = None
    skip_long: bool = False
    category: str | None = None

    def __post_init__(self) -> None:
        expect_at_least("data.limit", self.limit, 1, nullable=True)

    def load(self) -> PromptSet:
        """All prompts of the set, or at least the first `limit` where they have no category.

        Raises DataError where the source cannot be used.
        """
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
    """A file with one `{"prompt": "..."}` or `{"turns": ["...", ...]}` per line; `raw` skips the chat template.

    Files of Spec-Bench and SPEED-Bench have `turns`. A key `category` names the kind of prompt. A key `grammar` holds
    what `sampling.grammar` would for this prompt: `{"json_schema": {...}}`, `{"regex": "..."}` or `{"ebnf": "..."}`.
    """

    name: str = "jsonl"
    path: str = MISSING
    raw: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path in ("", MISSING):
            raise ValueError("data.path: expected a .jsonl file, got none")

    def load(self) -> PromptSet:
        return _of_file(self.name, self.path, self.raw)


@dataclass
class EditData(DataConfig):
    """60 requests to repeat a text, a program or a table with a change: most of the answer stands in the prompt."""

    name: str = "edit"

    def load(self) -> PromptSet:
        return _of_file(self.name, SHIPPED / "edit.jsonl")


@dataclass
class StructuredData(DataConfig):
    """24 requests for an answer in a grammar of its own: JSON schemas, regular expressions and EBNF."""

    name: str = "structured"

    def load(self) -> PromptSet:
        return _of_file(self.name, SHIPPED / "structured.jsonl")


@dataclass
class ChatData(DataConfig):
    """80 conversations of two turns, ten in each of the eight categories of MT-Bench."""

    name: str = "chat"

    def load(self) -> PromptSet:
        return _of_file(self.name, SHIPPED / "chat.jsonl")


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
        prompts = tuple(
            Prompt.of_turns(source.turns(record), source.answer(record), _category(record)) for record in records
        )
        if source.correct is None:
            return PromptSet(self.name, prompts)
        correct = source.correct
        return PromptSet(self.name, prompts, lambda prompt, text: correct(prompt.answer or "", text))


SETS: tuple[type[DataConfig], ...] = (
    ArithmeticData,
    CodeData,
    EditData,
    StructuredData,
    ChatData,
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
    prompts = loaded.prompts
    if config.category is not None:
        prompts = tuple(prompt for prompt in prompts if prompt.category == config.category)
        if not prompts:
            known = ", ".join(dict.fromkeys(p.category for p in loaded.prompts if p.category)) or "none"
            raise DataError(f"data.category: data={config.name} has {known}, got {config.category!r}")
    return replace(loaded, prompts=prompts[: config.limit])


def _of_file(name: str, path: str | Path, raw: bool = False) -> PromptSet:
    records = read_records(path)
    return PromptSet(name, tuple(replace(_file_prompt(record, raw), where=record.where) for record in records))


def _category(record: Record) -> str | None:
    value = record.fields.get("category")
    return value if isinstance(value, str) else None


def _file_prompt(record: Record, raw: bool) -> Prompt:
    present = [key for key in ("prompt", "turns") if key in record.fields]
    if len(present) != 1:
        found = ", ".join(map(repr, record.fields)) or "no key"
        raise DataError(f"{record.where}: expected either key 'prompt' or key 'turns', got {found}")
    answer = record.fields.get("answer")
    if answer is not None and not isinstance(answer, (str, int, float)):
        raise DataError(f"{record.where}: key 'answer': expected a string or a number, got {answer!r}")
    answer = None if answer is None else str(answer)
    grammar = record.fields.get("grammar")
    if grammar is not None and not isinstance(grammar, dict):
        raise DataError(f"{record.where}: key 'grammar': expected a mapping, got {grammar!r}")
    if present == ["prompt"]:
        return Prompt(record.text("prompt"), raw=raw, answer=answer, category=_category(record), grammar=grammar)
    if raw:
        raise DataError(f"{record.where}: 'turns' need the chat template; leave data.raw=false, or use key 'prompt'")
    return replace(Prompt.of_turns(record.texts("turns"), answer, _category(record)), grammar=grammar)
