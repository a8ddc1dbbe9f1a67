"""Arithmetic word problems with worked answers, generated from templates.

Any machine can make any number of them, and a program can check every answer. The text of a worked answer is regular
without being constant, so speculative decoding has something to predict. A problem belongs to the held-out split if and
only if the SHA-256 of its question is divisible by 50, so training and evaluation share no question at any seed.
"""

import hashlib
import operator
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from specdec_kernels.checks import expect_choice

HELDOUT_SEED = 20_260_601
HELDOUT_COUNT = 200
HELDOUT_MODULUS = 50
MAX_RESULT = 999

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


@dataclass(frozen=True)
class Problem:
    """One word problem: its text, the worked answer ending in "The answer is N.", and N."""

    question: str
    solution: str
    answer: int


class Template(NamedTuple):
    question: str
    ranges: list[tuple[str, str, str]]
    """(name, least, largest) of each free number."""
    steps: list[tuple[str, str, str, str, str]]
    """(result, left, operator, right, sentence), which states the step, with `{eq}` for the equation. Numbers that
    are derived from the free ones come first, without a sentence."""


def _read_templates() -> tuple[dict[str, list[str]], list[Template]]:
    """`arithmetic.txt`: words by placeholder, and templates of question, line of given numbers, and steps."""
    words, *paragraphs = (Path(__file__).parent / "arithmetic.txt").read_text("utf-8").strip().split("\n\n")
    templates = []
    for paragraph in paragraphs:
        question, numbers = paragraph.split("\ngiven ")
        ranges = re.findall(r"(\w+) (\d+)-(\d+)", numbers)
        steps = re.findall(r"(\w+) = (\w+) ([-+*/]) (\w+)(?:: (.*))?", numbers)
        templates.append(Template(question.replace("\n", " "), ranges, steps))
    return {name: given.split() for name, given in (line.split(": ") for line in words.splitlines())}, templates


WORDS, TEMPLATES = _read_templates()


def _values(template: Template, rng: random.Random) -> dict[str, int] | None:
    values = {name: rng.randint(int(low), int(high)) for name, low, high in template.ranges}
    for result, left, operation, right, _ in template.steps:
        value = OPERATORS[operation](values[left], values[right])
        inexact = operation == "/" and value * values[right] != values[left]
        if inexact or not 1 <= value <= MAX_RESULT:
            return None
        values[result] = value
    return values


def _problem(rng: random.Random) -> Problem:
    template = rng.choice(TEMPLATES)
    values = None
    while values is None:
        values = _values(template, rng)
    words = dict(zip(("name", "friend", "other"), rng.sample(WORDS["name"], 3), strict=True))
    words |= {kind: rng.choice(WORDS[kind]) for kind in ("things", "boxes", "place")}
    lines = []
    for result, left, operation, right, sentence in template.steps:
        equation = f"{values[left]} {operation} {values[right]} = {values[result]}"
        lines += [sentence.format(eq=equation, **words)] if sentence else []
    answer = values[template.steps[-1][0]]
    lines.append(f"The answer is {answer}.")
    return Problem(template.question.format(**values, **words), "\n".join(lines), answer)


def is_heldout(question: str) -> bool:
    """Whether a question belongs to the held-out split; depends on its text alone."""
    digest = hashlib.sha256(question.encode()).digest()
    return int.from_bytes(digest, "big") % HELDOUT_MODULUS == 0


def problem_stream(seed: int | str, split: str = "train") -> Iterator[Problem]:
    """Endless problems of one split, the same for the same seed on every machine."""
    expect_choice("split", split, ("train", "heldout"))
    rng = random.Random(f"arithmetic-{seed}")
    while True:
        problem = _problem(rng)
        if is_heldout(problem.question) == (split == "heldout"):
            yield problem


def problems(seed: int | str, count: int, split: str = "train") -> list[Problem]:
    """`count` problems with distinct questions from the stream of `seed`."""
    found: dict[str, Problem] = {}
    for problem in problem_stream(seed, split):
        if len(found) >= count:
            break
        found.setdefault(problem.question, problem)
    return list(found.values())


def heldout_problems(count: int = HELDOUT_COUNT) -> list[Problem]:
    """The first `count` of the fixed evaluation problems."""
    return problems(HELDOUT_SEED, count, "heldout")


def parse_answer(text: str) -> int | None:
    """N of the last "The answer is N" in `text`, or None."""
    matches = re.findall(r"The answer is (-?\d+)", text)
    return int(matches[-1]) if matches else None
