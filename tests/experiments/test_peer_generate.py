"""transformers' own decoding as a peer: the same prompts, the same text, forwards counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from experiments import peer_generate
from experiments.app.errors import UserError
from experiments.app.schema import REPO_ROOT

TINY = REPO_ROOT / "assets" / "tiny"


def test_assisted_generation_writes_the_greedy_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.jsonl"
    words = ["data=arithmetic", "limit=2", "max_new_tokens=24", "device=cpu", "dtype=float32", f"out={out}"]
    folders = [f"model={TINY / 'target'}", f"assistant={TINY / 'draft'}"]
    monkeypatch.setattr("sys.argv", ["peer_generate", *words, *folders])
    peer_generate.main()
    rows = {row["method"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert list(rows) == list(peer_generate.METHODS)
    assert rows["greedy"]["tokens_per_step"] == 1.0 and rows["greedy"]["lossless"]["checked"] == 0
    assert rows["assistant"]["tokens_per_step"] > 1.5, "the draft is trained for this target"
    for method in ("prompt_lookup", "assistant"):
        assert rows[method]["lossless"] == {"checked": 2, "identical": 2}
        assert rows[method]["output_tokens"] == rows["greedy"]["output_tokens"] > 0
    assert rows["greedy"]["versions"]["transformers"] and rows["greedy"]["clocks"] is None


no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("lenght=3", "lenght"),
        ("limit=few", "limit: expected a whole number"),
        ("dtype=bf16", "dtype: expected one of auto, bfloat16"),
        ("data=edit,edits", "unknown data 'edits'"),
        pytest.param("device=cuda", "no CUDA device", marks=no_gpu),
    ],
)
def test_a_wrong_word_is_named(word: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        peer_generate.settle(peer_generate.parsed([word]))
