"""Runs with grammars from their command line to their files, on the shipped family, and the shipped prompts."""

import json
from pathlib import Path

import pytest

from algorithms.engine.grammar import Grammars
from algorithms.models.tokenizer import Tokenizer
from algorithms.step.sampling_params import GrammarParams
from experiments.app.schema import REPO_ROOT
from experiments.app.workload import grammar_of
from experiments.data.prompts import datasets, load_prompts
from tests.experiments.test_tasks import Done, called

TINY = REPO_ROOT / "assets" / "tiny"
NAMES = {"type": "object", "properties": {"name": {"enum": ["oak", "elm"]}}, "required": ["name"]}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    home = tmp_path_factory.mktemp("grammars")
    rows = [
        {"prompt": "Name a tree.", "grammar": {"json_schema": NAMES}},
        {"prompt": "Count the trees."},
        {"prompt": "Tell a story.", "grammar": {"regex": "[a-z ]{400}"}},
    ]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "count.txt").write_text("[1-9] (oak|elm)s\n")
    asked = ("data=jsonl", "data.path=rows.jsonl", "data.limit=null", "sampling.grammar.regex=@count.txt")
    found = called(home, TINY, *asked, "algo=ngram", "sampling.max_new_tokens=24", "sampling.stop_strings=[]")
    assert found.returncode == 0, found.stderr
    return found


def test_rows_of_a_file_have_grammars_of_their_own(done: Done) -> None:
    """The second takes that of the run; the third is cut by its length limit."""
    requests = [json.loads(line) for line in done.read("requests.jsonl").splitlines()]
    tree, count, story = (request["text"] for request in requests)
    assert json.loads(tree)["name"] in ("oak", "elm")
    assert count[0] in "123456789" and count[1:] in (" oaks", " elms")
    assert set(story) <= set("abcdefghijklmnopqrstuvwxyz ")
    assert [request["parsed"] for request in requests] == [True, True, False]
    assert [request["finish_reason"] for request in requests] == ["stop_token", "stop_token", "length"]


def test_the_report_says_what_parsed(done: Done) -> None:
    row = done.results[-1]
    assert (row["num_parsed"], row["num_constrained"], row["lossless"]["identical"]) == (2, 3, 3)
    assert "2/3" in done.read("generate.md") and "not parsed" in done.read("report.html")
    said = " ".join((done.stdout + done.stderr).split())
    assert "1 of 3 outputs are incomplete in their grammar; truncated by sampling.max_new_tokens: 1" in said


def test_the_shipped_prompts_have_grammars_that_compile() -> None:
    prompts = load_prompts(datasets()["structured"]()).prompts
    tokenizer = Tokenizer.load(TINY / "target")
    grammars = Grammars.of_tokenizer(tokenizer, tokenizer.size)
    kinds = [grammar_of(prompt.grammar, GrammarParams()) for prompt in prompts]
    assert len({prompt.text for prompt in prompts}) == 24
    assert [prompt.category for prompt in prompts] == [kind.kind for kind in kinds]
    for kind in kinds:
        matcher = grammars.matcher(kind, tokenizer.eos_ids)
        assert matcher.allowed().any() and not matcher.complete


@pytest.mark.parametrize("regex", [".*", "[^a]*", "(.|\\n)*"])
def test_special_tokens_and_padding_are_no_text(regex: str) -> None:
    """A grammar that allows every character allows no token that the text would not show."""
    tokenizer = Tokenizer.load(TINY / "target")
    size = tokenizer.size + 999
    matcher = Grammars.of_tokenizer(tokenizer, size).matcher(GrammarParams(regex=regex), tokenizer.eos_ids)
    words = matcher.allowed().tolist()
    free = {token for token in range(size) if words[token // 32] >> (token % 32) & 1}
    special = set(tokenizer.special_ids().values())
    assert free & special == tokenizer.eos_ids < special
    assert len(free) > 1000 and max(free) < tokenizer.size


def test_a_grammar_that_begins_with_an_at_sign(tmp_path: Path) -> None:
    """In a file of prompts it is text: a line may not name a file. On the command line two of them are one."""
    (tmp_path / "count.txt").write_text("[1-9]\n")
    name = f"@{tmp_path / 'count.txt'}"
    assert grammar_of({"regex": name}, GrammarParams()).text == name
    assert grammar_of(None, GrammarParams(regex=name)).text == "[1-9]"
    assert grammar_of(None, GrammarParams(regex="@@[a-z]+")).text == "@[a-z]+"
