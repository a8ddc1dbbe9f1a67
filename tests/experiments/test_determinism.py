"""The price of determinism: every forward is timed with and without it, and bad settings are named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from experiments.determinism import DeterminismConfig, config_of, measure, random_model
from tests.algorithms.toy import CONFIG

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@torch.no_grad()
def test_every_forward_is_timed_twice() -> None:
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    model = random_model(replace(CONFIG, num_layers=1), DEVICE, dtype)
    config = DeterminismConfig(batches=[2], nodes=6, context=5, prefill=20, repeats=1, rounds=1)
    rows = list(measure(model, "toy", config))
    assert [(row["forward"], row["batch"]) for row in rows] == [
        ("decode 1", 2), ("chain 6", 2), ("tree 6", 2), ("prefill 20", 1)
    ]  # fmt: skip
    assert all(row["price"] == row["deterministic_ms"] / row["plain_ms"] > 0 for row in rows)


def test_a_shape_has_the_sizes_of_its_family() -> None:
    large = config_of("qwen3_8b")
    assert (large.hidden_size, large.num_layers, large.num_kv_heads, large.vocab_size) == (4096, 36, 8, 151936)
    assert large.architecture == config_of("tiny").architecture


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(shapes=["huge"]), "shapes: expected one of tiny, qwen3_8b"),
        (dict(nodes=4), "nodes: expected at least 5, got 4"),
        (dict(batches=[0]), "batches: expected at least 1, got 0"),
    ],
)
def test_wrong_settings_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeterminismConfig(**change)
