"""The functions for Python: docs/python.md and the notebook run, and each wrong call has its message."""

import gc
import json
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import algorithms
from algorithms import SamplingParams, generate, load_algorithm, load_backend, load_target
from algorithms.models.loading import Target
from algorithms.models.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
TINY = ROOT / "assets" / "tiny"
PROMPT = "def add(a, b):"


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TINY / "target", "cpu")


@pytest.fixture
def on_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the repository's root, on the CPU, without Triton's interpreter; outputs are short by default."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(SamplingParams.__init__, "__defaults__", (12, *SamplingParams.__init__.__defaults__[1:]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_the_page_runs(on_reference: None) -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(block, names)
    assert names["same"] == [True, True]
    assert re.fullmatch("[0-9]{4}-[0-9]{2}", names["constrained"].completions[0].text)


def test_the_notebook_runs(on_reference: None) -> None:
    book = json.loads((ROOT / "docs" / "decode.ipynb").read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5) and book["metadata"]["kernelspec"]["name"] == "python3"
    names: dict[str, Any] = {}
    for cell in book["cells"]:
        assert {"cell_type", "id", "metadata", "source"} <= cell.keys()
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            exec("".join(cell["source"]), names)
    assert names["lossless"] == dict.fromkeys(names["algorithms"], True)


def test_a_gpu_that_is_not_there(on_reference: None) -> None:
    with pytest.raises(ValueError, match="device: expected cpu or auto, as torch finds no GPU here, got 'cuda'"):
        load_target(TINY / "target", "cuda")


def test_prompts_as_text_as_tokens_and_as_chat(target: Target) -> None:
    tokenizer, short = Tokenizer.load(target.path), SamplingParams(max_new_tokens=6)
    ids = tokenizer.encode(PROMPT)
    by_text, by_ids, by_tensor, listed = (
        generate(target, prompt, sampling=short, impl="reference").completions
        for prompt in (PROMPT, ids, torch.tensor(ids), [PROMPT, ids])
    )
    assert by_text[0].token_ids == by_ids[0].token_ids == by_tensor[0].token_ids == listed[1].token_ids
    chat = generate(target, PROMPT, sampling=short, chat=True, impl="reference").completions
    rendered = generate(target, tokenizer.encode_chat([PROMPT]), sampling=short, impl="reference").completions
    assert chat[0].token_ids == rendered[0].token_ids


def test_seeds_bad_words_and_parameters_of_each_prompt(target: Target) -> None:
    """A shared seed gives each prompt its own random numbers; a list leaves seeds alone."""
    drawn = SamplingParams(max_new_tokens=8, temperature=1.5, seed=3)
    shared = generate(target, [PROMPT] * 3, "ngram", sampling=drawn, impl="reference").completions
    alone = generate(target, [PROMPT] * 3, "ngram", sampling=[drawn] * 3, impl="reference").completions
    assert len({tuple(done.token_ids) for done in shared}) == 3
    assert len({tuple(done.token_ids) for done in alone}) == 1
    plain = generate(target, PROMPT, sampling=SamplingParams(max_new_tokens=8), impl="reference").completions[0]
    word = SamplingParams(max_new_tokens=8, bad_words=(plain.text.split()[0],))
    assert plain.text.split()[0] not in generate(target, PROMPT, sampling=word, impl="reference").completions[0].text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: load_target("nowhere/at/all"), "model folder not found"),
        (lambda t: load_target(TINY / "target", "cpu", "int7"), "dtype: expected auto, float32"),
        (lambda t: load_algorithm("dflahs", t), "algorithm: expected one of .* got 'dflahs' .did you mean 'dflash'"),
        (lambda t: load_algorithm("dflash", t), "algo=dflash needs a drafter: .*draft="),
        (lambda t: load_algorithm("ngram", t, nodes=4), "algorithm ngram: 'nodes' is no setting; expected one of num"),
        (lambda t: load_backend("fa5"), "backend: expected one of .*fa4.*, got 'fa5'"),
        (lambda t: load_backend("torch", kernel="fa2"), "backend torch: 'kernel' is no setting; expected one of none"),
        (lambda t: generate(t, PROMPT, batch=4), "runtime: 'batch' is no setting here; expected one of impl"),
        (lambda t: generate(t, [[1, 2]], chat=True), "chat: expected prompts as text"),
        (lambda t: generate(t, PROMPT, sampling=[]), "sampling: expected one per prompt, 1, got 0"),
        (lambda t: generate(t, [[99999]]), "prompt tokens outside the vocabulary"),
        (lambda t: generate(t, PROMPT, sampling=SamplingParams(grammar={"regex": "("})), "cannot be compiled"),
    ],
)
def test_what_cannot_be_served_is_refused(target: Target, call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(target)


def test_a_drafter_serves_the_target_it_was_loaded_for(target: Target, on_reference: None) -> None:
    drafter = load_algorithm("dflash", target, draft=TINY / "dflash")
    assert len(generate(target, PROMPT, drafter, max_batch=1).completions) == 1
    other = load_target(TINY / "target", "cpu")
    with pytest.raises(ValueError, match="dflash was loaded for another target"):
        generate(other, PROMPT, drafter)
    lookup, weights = load_algorithm("ngram", other), weakref.ref(other.model)
    assert len(generate(target, PROMPT, lookup).completions) == 1
    del other
    gc.collect()
    assert weights() is None, "an algorithm without weights keeps those of a target"


def test_determinism_needs_kernels(target: Target, on_reference: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_kernels.launch.interpreting", lambda: False)
    if target.device.type == "cpu":
        with pytest.raises(ValueError, match="deterministic: expected a GPU, or TRITON_INTERPRET=1"):
            generate(target, PROMPT, deterministic=True)


def test_importing_the_package_imports_nothing_heavy() -> None:
    program = (
        "import sys, algorithms; algorithms.generate, algorithms.SamplingParams; "
        "from algorithms.models.tokenizer import Tokenizer; Tokenizer.load('assets/tiny/target').encode('a'); "
        "sys.exit(', '.join({'torch', 'triton', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        algorithms.nothing  # noqa: B018
