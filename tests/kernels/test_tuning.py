"""Settings that were tuned on a card replace those of the static table, there and nowhere else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.bench import tune
from experiments.bench.row import Bench
from experiments.bench.timing import Limits
from specdec_kernels import attention, tuning
from specdec_kernels.attention.cases import CASES
from specdec_kernels.attention.configs import attention_config

KEY = ("sm90", 128, 64, 2)
ROWS = [
    {"family": "attention", "card": "Card A", "key": list(KEY), "fields": {"num_stages": 5, "block_n": 32}},
    {"family": "attention", "card": "Card B", "key": list(KEY), "fields": {"num_stages": 2}},
]


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table on disk, and a card that torch names."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card A")
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps(ROWS))
    monkeypatch.setenv(tuning.VARIABLE, str(path))
    tuning._table.cache_clear()
    return path


def test_a_row_of_this_card_replaces_fields(card: Path) -> None:
    found, other = attention_config("sm90", 128, 40, 4096), attention_config("sm90", 128, 100, 4096)
    assert (found.num_stages, found.block_n, found.block_m) == (5, 32, 64)
    assert other.num_stages == 3, "another row of the table stays"
    assert attention_config("sm80", 128, 40, 4096).num_stages == 3, "another chip stays"
    assert attention_config("sm90", 128, 40, 4096, tuning={"num_stages": 4}).num_stages == 4, "a call decides last"
    fixed = attention_config("sm90", 128, 64, 4096, batch_invariant=True)
    assert fixed.num_stages != 5, "deterministic runs have one cut on all cards"


def test_another_card_and_an_empty_variable_keep_the_static_table(card: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card C")
    assert tuning.tuned_fields("attention", KEY) == {}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card B")
    assert tuning.tuned_fields("attention", KEY) == {"num_stages": 2}
    monkeypatch.setenv(tuning.VARIABLE, "")
    assert tuning.tuned_fields("attention", KEY) == {}


def test_the_shipped_table_of_a_card_is_found_by_its_name(
    card: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(tuning.VARIABLE)
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path)
    assert tuning.tuned_fields("attention", KEY) == {}
    (tmp_path / "card_a.json").write_text(json.dumps(ROWS))
    assert tuning.tuned_fields("attention", KEY) == {"num_stages": 5, "block_n": 32}


@pytest.mark.parametrize("text", ["", "{}x", '[{"family": "attention"}]', "3"])
def test_a_file_that_is_no_table_is_named(card: Path, text: str) -> None:
    card.write_text(text)
    with pytest.raises(ValueError, match="SPECDEC_TUNING=.*expected a list of rows"):
        tuning.tuned_fields("attention", KEY)


def test_shipped_tables_are_tables() -> None:
    for path in tuning.SHIPPED.glob("*.json"):
        (card,) = {row["card"] for row in json.loads(path.read_text())}
        assert path == tuning.card_file(card) and tuning.read_table(path, card)


def test_the_search_keeps_what_is_faster_and_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """With times that a table gives: stages 4 are faster, warps 8 are faster but disagree, block_n 128 does not fit."""
    speed = {("num_stages", 4): 0.8, ("num_warps", 8): 0.5, ("block_n", 32): 0.99}

    def timed(self: Any, fields: dict[str, int], bench: Bench) -> float | None:
        if fields.get("block_n") == 128:
            return None
        factor = 1.0
        for pair in fields.items():
            factor *= speed.get(pair, 1.0)
        return 10.0 * factor

    compared: list[dict[str, int]] = []

    def agrees(self: Any, fields: dict[str, int]) -> bool:
        compared.append(fields)
        return fields.get("num_warps") != 8

    monkeypatch.setattr(tune.Prepared, "time_us", timed)
    monkeypatch.setattr(tune.Prepared, "agrees", agrees)
    cases = [tune.Prepared(name, lambda: None, [], None) for name in "ab"]
    bench = Bench(torch.device("cpu"), torch.float32, None, (), 0, Limits(0, 1))
    found = tune.search("attention", cases, bench, lambda: True)
    assert found["fields"] == {"num_stages": 4} and found["gain"] == pytest.approx(0.2)
    assert found["table_us"] == {"a": 10.0, "b": 10.0} and found["tuned_us"]["b"] == pytest.approx(8.0)
    assert all(fields.keys() & {"num_stages", "num_warps"} for fields in compared if fields), "only what is faster"
    assert "took all the time" in tune.search("attention", cases, bench, lambda: False)["problem"]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="times the interpreter's own setting")
def test_a_case_is_timed_in_the_interpreter_with_fields_and_refused_where_it_disagrees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(torch.device("cpu"), torch.float32, None, (), 0, Limits(0, 1))
    (case, *_) = [case for case in CASES if case.name == "chain_odd"]
    one = tune.prepared("attention", case, bench)
    assert (one.time_us({"block_n": 16}, bench) or 0) > 0 and one.agrees({"block_n": 16})
    called: list[Any] = []
    monkeypatch.setattr(attention, case.function, lambda **arguments: called.append(arguments["tuning"]))
    tune._compile(("attention", "chain_odd", {"block_n": 16}, bench.device, bench.dtype, 0))
    assert called == [{"block_n": 16}], "what is compiled ahead is what is timed"
    monkeypatch.setattr(tune.parity, "check", lambda *_: tune.parity.Parity("differs", "", True))
    assert not one.agrees({"block_n": 16})
