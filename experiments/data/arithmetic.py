"""Arithmetic word problems with worked answers, generated from templates.

Any machine can make any number of them, and a program can check every answer. The text of a worked answer is regular
without being constant, so speculative decoding has something to predict. A problem belongs to the held-out split if and
only if the SHA-256 of its question is divisible by 50; training and evaluation cannot share a question, whatever their
seeds.
"""

from __future__ import annotations

import hashlib
import operator
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from specdec_kernels.checks import expect_choice

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

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


@dataclass(frozen=True)
class Problem:
    """One word problem: its text, the worked answer ending in "The answer is N.", and N."""

    question: str
    solution: str
    answer: int


@dataclass(frozen=True)
class Step:
    """`result = left operator right`. `sentence` states it, with `{eq}` for the equation; empty where nothing does."""

    result: str
    left: str
    operator: str
    right: str
    sentence: str

    @classmethod
    def parse(cls, line: str) -> Step:
        """A step from `m = b * c: The {boxes} hold {eq} {things}.`"""
        equation, _, sentence = line.partition(": ")
        result, _, left, symbol, right = equation.split()
        return cls(result, left, symbol, right, sentence)


@dataclass(frozen=True)
class Template:
    """A family of problems: question, ranges of the free numbers, numbers derived from them, steps of the answer."""

    question: str
    ranges: Mapping[str, tuple[int, int]]
    derived: tuple[Step, ...]
    steps: tuple[Step, ...]

    @classmethod
    def parse(cls, paragraph: str) -> Template:
        """A template from a paragraph of `TEMPLATE_TEXT`: question, line of given numbers, one step per line."""
        question, given, steps = re.split(r"\ngiven (.*)\n", paragraph)
        entries = given.split(", ")
        ranges = (re.split("[ -]", entry) for entry in entries if "=" not in entry)
        return cls(
            question.replace("\n", " "),
            {name: (int(low), int(high)) for name, low, high in ranges},
            tuple(Step.parse(entry) for entry in entries if "=" in entry),
            tuple(map(Step.parse, steps.splitlines())),
        )


TEMPLATE_TEXT = """\
{name} has {a} {things}. {name} buys {b} {boxes} with {c} {things} in each. How many {things} does {name} have now?
given a 2-99, b 2-9, c 2-12
m = b * c: The {boxes} hold {eq} {things}.
n = a + m: Together with the first ones that makes {eq} {things}.

{name} has {a} {things}. {name} buys {b} {boxes} with {c} {things} in each and then gives {d} {things} to {friend}.
How many {things} are left?
given a 2-60, b 2-9, c 2-12, d 2-50
m = b * c: The {boxes} hold {eq} {things}.
n = a + m: Together with the first ones that makes {eq} {things}.
r = n - d: After giving some to {friend} there are {eq} {things}.

A {place} sells {things} for {a} dollars each. {name} buys {b} of them and pays with {c} dollars. How many dollars
does {name} get back?
given a 2-12, b 2-9, c 10-120
m = a * b: The {things} cost {eq} dollars.
r = c - m: The change is {eq} dollars.

{name} shares {t} {things} equally among {n} friends. {friend} is one of them and already had {a} {things}. How many
{things} does {friend} have now?
given q 2-12, n 2-9, a 2-90, t = q * n
m = t / n: Each friend gets {eq} {things}.
r = m + a: {friend} now has {eq} {things}.

{name} read {a} pages on Monday and {b} pages on Tuesday. The book has {c} pages. How many pages are left to read?
given a 5-80, b 5-80, c 60-300
m = a + b: {name} has read {eq} pages.
r = c - m: So {eq} pages are left.

{name} earns {a} dollars an hour and works {b} hours a day. After {c} days {name} spends {d} dollars. How many dollars
remain?
given a 5-12, b 2-8, c 2-5, d 5-90
m = a * b: In one day {name} earns {eq} dollars.
n = m * c: In all the days {name} earns {eq} dollars.
r = n - d: After spending there remain {eq} dollars.

{name} has {a} {things} and {friend} has {b} more {things} than {name}. How many {things} do they have together?
given a 2-90, b 2-60
m = a + b: {friend} has {eq} {things}.
r = a + m: Together they have {eq} {things}.

{name} collected {a} {things}. {friend} collected {b} times as many. They put all of them into {boxes} of {c}. How
many {boxes} do they fill?
given q 2-30, b 2-6, c 2-9, a = q * c
m = b * a: {friend} collected {eq} {things}.
n = a + m: Together they have {eq} {things}.
r = n / c: They fill {eq} {boxes}.

A train has {a} cars with {b} seats each. {c} seats are taken. How many seats are free?
given a 2-12, b 4-20, c 3-120
m = a * b: The train has {eq} seats.
r = m - c: So {eq} seats are free.

The {place} had {a} visitors on Friday, {b} on Saturday and {c} on Sunday. How many visitors came in the three days?
given a 10-250, b 10-250, c 10-250
m = a + b: On the first two days there were {eq} visitors.
r = m + c: In the three days there were {eq} visitors.

{name} bakes {a} trays of {b} muffins. {c} muffins are burnt and {name} sells the rest for {d} dollars each. How many
dollars does {name} earn?
given a 2-6, b 4-12, c 2-40, d 2-5
m = a * b: {name} bakes {eq} muffins.
n = m - c: There are {eq} good muffins.
r = n * d: {name} earns {eq} dollars.

A rope is {t} meters long. {name} cuts it into {n} equal pieces and uses {a} of them. How many meters of rope are
left?
given q 2-12, n 3-9, a 2-8, t = q * n
m = t / n: Each piece is {eq} meters long.
u = a * m: {name} uses {eq} meters.
r = t - u: So {eq} meters are left.

{name} plants {a} rows of {b} {things} and {c} rows of {d} {things}. How many {things} are there in all?
given a 2-9, b 2-12, c 2-9, d 2-12
m = a * b: The first rows have {eq} {things}.
n = c * d: The other rows have {eq} {things}.
r = m + n: In all there are {eq} {things}.

{name} is {a} years old. {friend} is {b} years younger, and {other} is {c} times as old as {friend}. How old is
{other}?
given a 8-30, b 2-20, c 2-5
m = a - b: {friend} is {eq} years old.
r = c * m: {other} is {eq} years old.

The {place} has {a} {things}. It uses {b} {things} every day for {c} days and then gets {d} new ones. How many
{things} does it have?
given a 40-300, b 2-12, c 2-9, d 5-90
m = b * c: In that time it uses {eq} {things}.
n = a - m: Then {eq} {things} remain.
r = n + d: With the new ones it has {eq} {things}.

{name}, {friend} and {other} have {t} {things} together. {name} has {a} of them and {friend} has {b}. How many
{things} does {other} have?
given a 5-120, b 5-120, c 5-120, s = a + b, t = s + c
m = a + b: {name} and {friend} have {eq} {things}.
r = t - m: So {other} has {eq} {things}.

{name} packs {t} {things} into {boxes} of {n}. Each of the {boxes} is sold for {a} dollars, and {name} pays {b}
dollars for a taxi. How many dollars does {name} keep?
given q 3-12, n 2-9, a 2-12, b 2-30, t = q * n
m = t / n: There are {eq} {boxes}.
u = m * a: They are sold for {eq} dollars.
r = u - b: After the taxi {name} keeps {eq} dollars.

A bus starts with {a} people. At the first stop {b} get off and {c} get on. At the second stop {d} get off. How many
people are on the bus now?
given a 10-60, b 2-30, c 2-30, d 2-30
m = a - b: After some get off there are {eq} people.
n = m + c: After some get on there are {eq} people.
r = n - d: After the second stop there are {eq} people.

{name} fills {a} {boxes} with {b} {things} each, gives {c} {things} to {friend}, and shares the rest equally among {n}
children. How many {things} does each child get?
given a 2-9, b 3-12, q 2-12, n 2-8, all = a * b, rest = q * n, c = all - rest
m = a * b: The {boxes} hold {eq} {things}.
u = m - c: After the gift there are {eq} {things}.
r = u / n: Each child gets {eq} {things}.
"""
TEMPLATES = tuple(map(Template.parse, TEMPLATE_TEXT.strip().split("\n\n")))


def _values(template: Template, rng: random.Random) -> dict[str, int] | None:
    values = {key: rng.randint(low, high) for key, (low, high) in template.ranges.items()}
    for step in template.derived + template.steps:
        left, right = values[step.left], values[step.right]
        value = OPERATORS[step.operator](left, right)
        inexact = step.operator == "/" and value * right != left
        if inexact or not 1 <= value <= MAX_RESULT:
            return None
        values[step.result] = value
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
