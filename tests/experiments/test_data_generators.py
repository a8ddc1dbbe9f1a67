"""Generated data: worked answers are right, splits are disjoint, held-out modules stay out of training."""

import re

import pytest

from experiments.data import arithmetic, code
from experiments.data.arithmetic import Problem, heldout_problems, is_heldout, parse_answer, problems

EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


def _check_worked_answer(problem: Problem) -> None:
    known = {int(number) for number in re.findall(r"\d+", problem.question)}
    equations = EQUATION.findall(problem.solution)
    assert 2 <= len(equations) <= 4
    for left, operator, right, result in equations:
        # eval is the independent judge here: the generator computes with its own operator table.
        assert eval(f"{left} {operator} {right}") == int(result), problem
        assert {int(left), int(right)} <= known, f"a step uses a number nobody gave: {problem}"
        known.add(int(result))
    assert int(equations[-1][3]) == problem.answer == parse_answer(problem.solution)
    assert 0 <= problem.answer <= arithmetic.MAX_RESULT


def test_every_step_of_a_worked_answer_is_right_and_leaves_no_placeholder() -> None:
    assert len(arithmetic.TEMPLATES) >= 12
    found = [*problems(3, 1000), *problems(3, 200, "heldout")]
    for problem in found:
        _check_worked_answer(problem)
    assert not any("{" in p.question + p.solution for p in found)
    assert {len(EQUATION.findall(p.solution)) for p in found} == {2, 3}


def test_splits_never_meet() -> None:
    train = {p.question for p in problems(1, 3000)} | {p.question for p in problems(2, 3000)}
    heldout = {p.question for p in problems(1, 200, "heldout")}
    assert not train & heldout
    assert all(is_heldout(q) for q in heldout) and not any(is_heldout(q) for q in train)


def test_evaluation_set_is_fixed_distinct_and_a_prefix() -> None:
    full = heldout_problems()
    assert len(full) == len({p.question for p in full}) == 200
    assert heldout_problems(10) == full[:10] and problems(8, 50) == problems(8, 50) != problems(9, 50)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 12.", 12),
        ("The answer is 3. No: The answer is 45.", 45),
        ("The answer is -7", -7),
        ("It is 12.", None),
    ],
)
def test_parse_answer(text: str, expected: int | None) -> None:
    assert parse_answer(text) == expected


def test_heldout_modules_are_not_trained_on() -> None:
    heldout = set(code.heldout_files())
    training = code.training_files()
    assert len(heldout) >= 12 and len(training) > 200 and not heldout & set(training)
    parts = {part for path in training for part in path.relative_to(code.stdlib_folder()).parts}
    assert not parts & code.EXCLUDED_FOLDERS


def test_function_beginnings_are_the_same_every_time_and_start_functions() -> None:
    found = code.function_beginnings()
    assert len(found) == 64 and found == code.function_beginnings()
    assert {b.module for b in found} <= set(code.HELDOUT_MODULES)
    assert len({b.prompt for b in found}) == 64
    for beginning in found:
        lines = beginning.prompt.splitlines()
        assert code.MIN_PROMPT_LINES <= len(lines) <= code.MAX_PROMPT_LINES
        assert lines[0].startswith(("def ", "async def ")), beginning


def test_a_function_beginning_is_a_proper_prefix_of_its_function() -> None:
    source = {path.stem: path.read_text() for path in code.heldout_files()}
    for beginning in code.function_beginnings(20):
        stripped = [line.strip() for line in source[beginning.module].splitlines()]
        lines = [line.strip() for line in beginning.prompt.splitlines()]
        places = [i for i in range(len(stripped)) if stripped[i : i + len(lines)] == lines]
        assert places, beginning


def test_too_many_function_beginnings_are_refused() -> None:
    with pytest.raises(ValueError, match="count=100000"):
        code.function_beginnings(100_000)
