"""Prompt sets by name, as the configuration group `data` offers them.

A set is a configuration dataclass whose `load` makes the prompts. The command line imports this module before anything
is checked, so it imports no torch, and imports the generators only when a set is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, make_dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from omegaconf import MISSING

from algorithms.checked import Between, Checked
from experiments.data.prompt_files import DataError, Record, read_records
from experiments.data.public import PUBLIC_SETS, WORDINGS, read_public, same_boxed, same_number

if TYPE_CHECKING:
    from algorithms.models.tokenizer import Tokenizer

__all__ = ["DataConfig", "DataError", "JsonlData", "Prompt", "PromptSet", "datasets", "load_prompts"]

SHIPPED = Path(__file__).parent  # the folder of this project's prompt files
LONG_COUNT = 8  # prompts of `data=long`
CHARACTERS_OF_A_TOKEN = 6  # more than a token of Python source has in the mean, for any tokenizer


@dataclass(frozen=True)
class Prompt:
    """The input of one request, or of several in a row: the turns of a conversation."""

    text: str  # shown in reports, and encoded where there are no `turns`
    turns: tuple[str, ...] | None = None
    """User turns of a conversation, in order. Each becomes a request after the answer to the previous one."""
    raw: bool = False  # encode `text` without the chat template
    answer: str | None = None
    stop_strings: tuple[str, ...] = ()
    where: str = ""  # place in a file, as `file:line`
    category: str | None = None  # the kind of the prompt, in sets that name kinds
    grammar: Mapping[str, Any] | None = None
    """A grammar for the answer, with the keys of `sampling.grammar`, which it replaces; None keeps that one."""
    num_tokens: int | None = None  # of a raw prompt: its first tokens, which are so many; None takes all

    @property
    def num_turns(self) -> int:
        """Requests that this prompt becomes."""
        return len(self.turns) if self.turns else 1

    def turn(self, number: int) -> str:
        """The text of the turn `number`, from 0."""
        return self.turns[number] if self.turns else self.text

    def encode(self, tokenizer: Tokenizer, replies: Sequence[str] = ()) -> list[int]:
        """Token ids of the conversation up to the turn after `replies`, ready for the model's answer."""
        if self.raw:
            ids = tokenizer.encode(self.text)[: self.num_tokens]
            if len(ids) < (self.num_tokens or 0):
                raise ValueError(f"the text of a prompt: expected at least {self.num_tokens} tokens, got {len(ids)}")
            return ids
        return tokenizer.encode_chat((self.turns or (self.text,))[: len(replies) + 1], replies)

    @classmethod
    def of_turns(cls, turns: tuple[str, ...], answer: str | None, category: str | None = None) -> Prompt:
        """A conversation, shown as one text."""
        return cls("\n\n".join(turns), turns=turns, answer=answer, category=category)


Score = Callable[[Prompt, str], bool]


@dataclass(frozen=True)
class PromptSet:
    name: str
    prompts: tuple[Prompt, ...]
    score: Score | None = None  # (prompt, generated text) to right or wrong; None where no answers are known


@dataclass
class DataConfig(Checked):
    """Common to all sets."""

    GROUP = "data."
    name: str = MISSING
    limit: Annotated[int | None, Between(1)] = None
    """Keep the first prompts; null keeps all."""
    skip_long: bool = False
    """Leave out prompts that are too long for the model, instead of refusing the run."""
    category: str | None = None
    """Keep the prompts of one kind."""

    def load(self) -> PromptSet:
        """All prompts of the set, or at least the first `limit` where they have no category. Raises DataError where the
        source cannot be used."""
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
        from experiments.data.code import function_beginnings

        return PromptSet(self.name, tuple(Prompt(item.prompt, raw=True) for item in function_beginnings()))


@dataclass
class LongData(DataConfig):
    """8 prompts of exactly `tokens` tokens, standard-library source, to measure long contexts."""

    name: str = "long"
    tokens: Annotated[int, Between(1)] = 8192

    def load(self) -> PromptSet:
        from experiments.data.code import source_windows

        texts = source_windows(min(self.limit or LONG_COUNT, LONG_COUNT), CHARACTERS_OF_A_TOKEN * self.tokens)
        return PromptSet(self.name, tuple(Prompt(text, raw=True, num_tokens=self.tokens) for text in texts))


@dataclass
class JsonlData(DataConfig):
    """A file with one `{"prompt": "..."}` or `{"turns": ["...", ...]}` per line; `raw` skips the chat template. Files
    of Spec-Bench and SPEED-Bench have `turns`. A key `category` names the kind of prompt. A key `grammar` holds what
    `sampling.grammar` would for this prompt: `{"json_schema": {...}}`, `{"regex": "..."}` or `{"ebnf": "..."}`."""

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
class ShippedData(DataConfig):
    """A set whose file lies in this folder."""

    def load(self) -> PromptSet:
        return _of_file(self.name, SHIPPED / f"{self.name}.jsonl")


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
    wording: Annotated[str, WORDINGS] = "own"
    """`own`, or `field`: the instructions of the field's tables."""

    def load(self) -> PromptSet:
        source = PUBLIC_SETS[self.name]
        prompts = tuple(
            Prompt.of_turns(source.worded(record, self.wording), source.known_answer(record), _category(record))
            for record in read_public(self.name, self.path)
        )
        correct = same_boxed if self.wording == "field" and source.correct is same_number else source.correct
        if all(prompt.answer is None for prompt in prompts):
            correct = None
        return PromptSet(self.name, prompts, correct and (lambda prompt, text: correct(prompt.answer or "", text)))


SHIPPED_SETS = {
    "edit": "60 requests to repeat a text, a program or a table with a change: the prompt holds most of the answer.",
    "structured": "24 requests for an answer in a grammar of its own: JSON schemas, regular expressions and EBNF.",
    "chat": "80 conversations of two turns, ten in each of the eight categories of MT-Bench.",
}


RUN_LIMITS = {"arithmetic": 2, "code": 8, "edit": 8, "chat": 8} | dict.fromkeys(PUBLIC_SETS, 16)
"""`data.limit` of a run of `data=NAME` that gives none: less than a minute for `arithmetic` in the interpreter."""


@cache
def datasets() -> dict[str, type[DataConfig]]:
    """Configuration classes of all sets by name."""
    found: dict[str, type[DataConfig]] = {
        kind.name: kind for kind in (ArithmeticData, CodeData, LongData, JsonlData, TextData)
    }
    for base, docs in ((ShippedData, SHIPPED_SETS), (PublicData, dict.fromkeys(PUBLIC_SETS, PublicData.__doc__))):
        for name, doc in docs.items():
            namespace = {"__doc__": doc}
            found[name] = make_dataclass(f"{name}_data", [("name", str, name)], bases=(base,), namespace=namespace)
    return found


def load_prompts(config: DataConfig) -> PromptSet:
    """The prompts of `config`, at most `config.limit`. Raises DataError naming the unusable source."""
    loaded = config.load()
    prompts = loaded.prompts
    if config.category is not None:
        prompts = tuple(prompt for prompt in prompts if prompt.category == config.category)
        if not prompts:
            known = ", ".join(dict.fromkeys(p.category for p in loaded.prompts if p.category)) or "none"
            raise DataError(f"data.category: data={config.name} has {known}, got {config.category!r}")
    return replace(loaded, prompts=prompts[: config.limit])


def _of_file(name: str, path: str | Path, raw: bool = False) -> PromptSet:
    return PromptSet(name, tuple(_file_prompt(record, raw) for record in read_records(path)))


def _category(record: Record) -> str | None:
    value = record.fields.get("category")
    return value if isinstance(value, str) else None


def _file_prompt(record: Record, raw: bool) -> Prompt:
    present = [key for key in ("prompt", "turns") if key in record.fields]
    if len(present) != 1:
        found = ", ".join(map(repr, record.fields)) or "no key"
        raise DataError(f"{record.where}: expected either key 'prompt' or key 'turns', got {found}")
    for key, kinds, expected in (("answer", (str, int, float), "a string or a number"), ("grammar", dict, "a mapping")):
        value = record.fields.get(key)
        if value is not None and not isinstance(value, kinds):
            raise DataError(f"{record.where}: key '{key}': expected {expected}, got {value!r}")
    answer, grammar = record.fields.get("answer"), record.fields.get("grammar")
    turns = record.texts("turns") if present == ["turns"] else None
    if turns and raw:
        raise DataError(f"{record.where}: 'turns' need the chat template; leave data.raw=false, or use key 'prompt'")
    text, given = "\n\n".join(turns) if turns else record.text("prompt"), None if answer is None else str(answer)
    return Prompt(text, turns, raw, given, where=record.where, category=_category(record), grammar=grammar)
