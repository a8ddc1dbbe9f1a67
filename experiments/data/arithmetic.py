"""Arithmetic word problems with worked answers, generated from templates.

Any machine can make as many as it wants, every answer can be checked by a program, and the text of a worked answer is
regular without being constant, which is what makes speculative decoding interesting to watch. A problem belongs to the
held-out split iff the SHA-256 of its question is divisible by 50, so training and evaluation cannot share a question
whatever seeds they use.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

HELDOUT_SEED = 20_260_601
HELDOUT_COUNT = 200
HELDOUT_MODULUS = 50
MAX_RESULT = 999

# fmt: off
NAMES = (
    "Ada", "Amir", "Bella", "Ben", "Carla", "Chen", "Dana", "Emil", "Eva", "Farid", "Grace", "Hugo",
    "Ines", "Ivan", "Jack", "Kira", "Leo", "Lina", "Maya", "Nils", "Nora", "Omar", "Paula", "Priya",
    "Quinn", "Rosa", "Sam", "Tara", "Uma", "Viktor", "Wendy", "Yusuf", "Zoe",
)
THINGS = (
    "apples", "beads", "books", "buttons", "cards", "coins", "cookies", "cups", "eggs", "flowers",
    "lemons", "marbles", "muffins", "nuts", "oranges", "pears", "pencils", "pens", "plums", "ribbons",
    "rocks", "shells", "stamps", "stickers", "tickets", "toys",
)
BOXES = ("bags", "baskets", "boxes", "crates", "jars", "packs", "trays")
PLACES = (
    "bakery", "cafe", "farm", "garden", "hotel", "library", "market", "museum", "office", "school",
    "shop", "station",
)
# fmt: on

OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
}


@dataclass(frozen=True)
class Problem:
    """One word problem: its text, the worked answer ending in "The answer is N.", and N."""

    question: str
    solution: str
    answer: int


@dataclass(frozen=True)
class Step:
    """`result = left operator right`, told by `sentence`, in which `{eq}` stands for the equation."""

    result: str
    left: str
    operator: str
    right: str
    sentence: str


@dataclass(frozen=True)
class Template:
    """A family of problems: the question, ranges of the free numbers, derived givens, and the steps of the answer."""

    question: str
    ranges: Mapping[str, tuple[int, int]]
    steps: tuple[Step, ...]
    derived: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)


TEMPLATES = (
    Template(
        "{name} has {a} {things}. {name} buys {b} {boxes} with {c} {things} in each. "
        "How many {things} does {name} have now?",
        {"a": (2, 99), "b": (2, 9), "c": (2, 12)},
        (
            Step("m", "b", "*", "c", "The {boxes} hold {eq} {things}."),
            Step("n", "a", "+", "m", "Together with the first ones that makes {eq} {things}."),
        ),
    ),
    Template(
        "{name} has {a} {things}. {name} buys {b} {boxes} with {c} {things} in each and then gives {d} {things} to "
        "{friend}. How many {things} are left?",
        {"a": (2, 60), "b": (2, 9), "c": (2, 12), "d": (2, 50)},
        (
            Step("m", "b", "*", "c", "The {boxes} hold {eq} {things}."),
            Step("n", "a", "+", "m", "Together with the first ones that makes {eq} {things}."),
            Step("r", "n", "-", "d", "After giving some to {friend} there are {eq} {things}."),
        ),
    ),
    Template(
        "A {place} sells {things} for {a} dollars each. {name} buys {b} of them and pays with {c} dollars. "
        "How many dollars does {name} get back?",
        {"a": (2, 12), "b": (2, 9), "c": (10, 120)},
        (
            Step("m", "a", "*", "b", "The {things} cost {eq} dollars."),
            Step("r", "c", "-", "m", "The change is {eq} dollars."),
        ),
    ),
    Template(
        "{name} shares {t} {things} equally among {n} friends. {friend} is one of them and already had {a} {things}. "
        "How many {things} does {friend} have now?",
        {"q": (2, 12), "n": (2, 9), "a": (2, 90)},
        (
            Step("m", "t", "/", "n", "Each friend gets {eq} {things}."),
            Step("r", "m", "+", "a", "{friend} now has {eq} {things}."),
        ),
        {"t": ("q", "*", "n")},
    ),
    Template(
        "{name} read {a} pages on Monday and {b} pages on Tuesday. The book has {c} pages. "
        "How many pages are left to read?",
        {"a": (5, 80), "b": (5, 80), "c": (60, 300)},
        (
            Step("m", "a", "+", "b", "{name} has read {eq} pages."),
            Step("r", "c", "-", "m", "So {eq} pages are left."),
        ),
    ),
    Template(
        "{name} earns {a} dollars an hour and works {b} hours a day. After {c} days {name} spends {d} dollars. "
        "How many dollars remain?",
        {"a": (5, 12), "b": (2, 8), "c": (2, 5), "d": (5, 90)},
        (
            Step("m", "a", "*", "b", "In one day {name} earns {eq} dollars."),
            Step("n", "m", "*", "c", "In all the days {name} earns {eq} dollars."),
            Step("r", "n", "-", "d", "After spending there remain {eq} dollars."),
        ),
    ),
    Template(
        "{name} has {a} {things} and {friend} has {b} more {things} than {name}. "
        "How many {things} do they have together?",
        {"a": (2, 90), "b": (2, 60)},
        (
            Step("m", "a", "+", "b", "{friend} has {eq} {things}."),
            Step("r", "a", "+", "m", "Together they have {eq} {things}."),
        ),
    ),
    Template(
        "{name} collected {a} {things}. {friend} collected {b} times as many. They put all of them into {boxes} of "
        "{c}. How many {boxes} do they fill?",
        {"q": (2, 30), "b": (2, 6), "c": (2, 9)},
        (
            Step("m", "b", "*", "a", "{friend} collected {eq} {things}."),
            Step("n", "a", "+", "m", "Together they have {eq} {things}."),
            Step("r", "n", "/", "c", "They fill {eq} {boxes}."),
        ),
        {"a": ("q", "*", "c")},
    ),
    Template(
        "A train has {a} cars with {b} seats each. {c} seats are taken. How many seats are free?",
        {"a": (2, 12), "b": (4, 20), "c": (3, 120)},
        (
            Step("m", "a", "*", "b", "The train has {eq} seats."),
            Step("r", "m", "-", "c", "So {eq} seats are free."),
        ),
    ),
    Template(
        "The {place} had {a} visitors on Friday, {b} on Saturday and {c} on Sunday. "
        "How many visitors came in the three days?",
        {"a": (10, 250), "b": (10, 250), "c": (10, 250)},
        (
            Step("m", "a", "+", "b", "On the first two days there were {eq} visitors."),
            Step("r", "m", "+", "c", "In the three days there were {eq} visitors."),
        ),
    ),
    Template(
        "{name} bakes {a} trays of {b} muffins. {c} muffins are burnt and {name} sells the rest for {d} dollars each. "
        "How many dollars does {name} earn?",
        {"a": (2, 6), "b": (4, 12), "c": (2, 40), "d": (2, 5)},
        (
            Step("m", "a", "*", "b", "{name} bakes {eq} muffins."),
            Step("n", "m", "-", "c", "There are {eq} good muffins."),
            Step("r", "n", "*", "d", "{name} earns {eq} dollars."),
        ),
    ),
    Template(
        "A rope is {t} meters long. {name} cuts it into {n} equal pieces and uses {a} of them. "
        "How many meters of rope are left?",
        {"q": (2, 12), "n": (3, 9), "a": (2, 8)},
        (
            Step("m", "t", "/", "n", "Each piece is {eq} meters long."),
            Step("u", "a", "*", "m", "{name} uses {eq} meters."),
            Step("r", "t", "-", "u", "So {eq} meters are left."),
        ),
        {"t": ("q", "*", "n")},
    ),
    Template(
        "{name} plants {a} rows of {b} {things} and {c} rows of {d} {things}. How many {things} are there in all?",
        {"a": (2, 9), "b": (2, 12), "c": (2, 9), "d": (2, 12)},
        (
            Step("m", "a", "*", "b", "The first rows have {eq} {things}."),
            Step("n", "c", "*", "d", "The other rows have {eq} {things}."),
            Step("r", "m", "+", "n", "In all there are {eq} {things}."),
        ),
    ),
    Template(
        "{name} is {a} years old. {friend} is {b} years younger, and {other} is {c} times as old as {friend}. "
        "How old is {other}?",
        {"a": (8, 30), "b": (2, 20), "c": (2, 5)},
        (
            Step("m", "a", "-", "b", "{friend} is {eq} years old."),
            Step("r", "c", "*", "m", "{other} is {eq} years old."),
        ),
    ),
    Template(
        "The {place} has {a} {things}. It uses {b} {things} every day for {c} days and then gets {d} new ones. "
        "How many {things} does it have?",
        {"a": (40, 300), "b": (2, 12), "c": (2, 9), "d": (5, 90)},
        (
            Step("m", "b", "*", "c", "In that time it uses {eq} {things}."),
            Step("n", "a", "-", "m", "Then {eq} {things} remain."),
            Step("r", "n", "+", "d", "With the new ones it has {eq} {things}."),
        ),
    ),
    Template(
        "{name}, {friend} and {other} have {t} {things} together. {name} has {a} of them and {friend} has {b}. "
        "How many {things} does {other} have?",
        {"a": (5, 120), "b": (5, 120), "c": (5, 120)},
        (
            Step("m", "a", "+", "b", "{name} and {friend} have {eq} {things}."),
            Step("r", "t", "-", "m", "So {other} has {eq} {things}."),
        ),
        {"s": ("a", "+", "b"), "t": ("s", "+", "c")},
    ),
    Template(
        "{name} packs {t} {things} into {boxes} of {n}. Each of the {boxes} is sold for {a} dollars, and {name} pays "
        "{b} dollars for a taxi. How many dollars does {name} keep?",
        {"q": (3, 12), "n": (2, 9), "a": (2, 12), "b": (2, 30)},
        (
            Step("m", "t", "/", "n", "There are {eq} {boxes}."),
            Step("u", "m", "*", "a", "They are sold for {eq} dollars."),
            Step("r", "u", "-", "b", "After the taxi {name} keeps {eq} dollars."),
        ),
        {"t": ("q", "*", "n")},
    ),
    Template(
        "A bus starts with {a} people. At the first stop {b} get off and {c} get on. At the second stop {d} get off. "
        "How many people are on the bus now?",
        {"a": (10, 60), "b": (2, 30), "c": (2, 30), "d": (2, 30)},
        (
            Step("m", "a", "-", "b", "After some get off there are {eq} people."),
            Step("n", "m", "+", "c", "After some get on there are {eq} people."),
            Step("r", "n", "-", "d", "After the second stop there are {eq} people."),
        ),
    ),
    Template(
        "{name} fills {a} {boxes} with {b} {things} each, gives {c} {things} to {friend}, and shares the rest equally "
        "among {n} children. How many {things} does each child get?",
        {"a": (2, 9), "b": (3, 12), "q": (2, 12), "n": (2, 8)},
        (
            Step("m", "a", "*", "b", "The {boxes} hold {eq} {things}."),
            Step("u", "m", "-", "c", "After the gift there are {eq} {things}."),
            Step("r", "u", "/", "n", "Each child gets {eq} {things}."),
        ),
        {"all": ("a", "*", "b"), "rest": ("q", "*", "n"), "c": ("all", "-", "rest")},
    ),
)


def _values(template: Template, rng: random.Random) -> dict[str, int] | None:
    values = {key: rng.randint(low, high) for key, (low, high) in template.ranges.items()}
    formulas = [(result, *formula) for result, formula in template.derived.items()]
    formulas += [(step.result, step.left, step.operator, step.right) for step in template.steps]
    for result, left, operator, right in formulas:
        value = OPERATORS[operator](values[left], values[right])
        inexact = operator == "/" and value * values[right] != values[left]
        if inexact or not 1 <= value <= MAX_RESULT:
            return None
        values[result] = value
    return values


def _words(rng: random.Random) -> dict[str, str]:
    name, friend, other = rng.sample(NAMES, 3)
    words = {"name": name, "friend": friend, "other": other}
    return words | {"things": rng.choice(THINGS), "boxes": rng.choice(BOXES), "place": rng.choice(PLACES)}


def _problem(rng: random.Random) -> Problem:
    template = rng.choice(TEMPLATES)
    values = None
    while values is None:
        values = _values(template, rng)
    words = _words(rng)
    lines = []
    for step in template.steps:
        equation = f"{values[step.left]} {step.operator} {values[step.right]} = {values[step.result]}"
        lines.append(step.sentence.format(eq=equation, **words))
    answer = values[template.steps[-1].result]
    lines.append(f"The answer is {answer}.")
    return Problem(template.question.format(**values, **words), "\n".join(lines), answer)


def is_heldout(question: str) -> bool:
    """Whether a question belongs to the held-out split; depends on its text alone."""
    digest = hashlib.sha256(question.encode()).digest()
    return int.from_bytes(digest, "big") % HELDOUT_MODULUS == 0


def problem_stream(seed: int | str, split: str = "train") -> Iterator[Problem]:
    """Endless problems of one split, the same for the same seed on every machine."""
    if split not in ("train", "heldout"):
        raise ValueError(f"split must be 'train' or 'heldout', got '{split}'")
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
