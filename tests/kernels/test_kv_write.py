"""Fused norm, rotation and store beyond case-by-case parity: an independent oracle, and untouched slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from specdec_kernels.cases import Maker
from specdec_kernels.kv_write import materialize_kv, write_kv
from specdec_kernels.kv_write.cases import materialize_inputs, rope_table, write_inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS = ("triton", "reference")


def rms_norm(weight: torch.Tensor, eps: float) -> Qwen3RMSNorm:
    norm = Qwen3RMSNorm(weight.shape[0], eps).to(weight.device, weight.dtype)
    norm.weight.data.copy_(weight)
    return norm


def transformers_rotation(
    x: torch.Tensor, positions: torch.Tensor, head_dim: int
) -> torch.Tensor:  # x [T, H, D]
    config = Qwen3Config(head_dim=head_dim, hidden_size=head_dim, num_attention_heads=1)
    embedding = Qwen3RotaryEmbedding(config).to(x.device)
    cos, sin = embedding(x[None].float(), positions[None])
    rotated, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    return rotated[0].transpose(0, 1)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_same_as_transformers(dtype: torch.dtype, impl: str) -> None:
    head_dim = 32
    make = Maker.seeded(DEVICE, dtype)
    arguments = write_inputs(make, tokens=9, heads=(6, 2), head_dim=head_dim)
    config = Qwen3Config()
    arguments["rope"] = rope_table(make, 64, head_dim, theta=config.rope_parameters["rope_theta"])
    q, k, v, slots, positions = (arguments[name] for name in ("q", "k", "v", "slots", "positions"))

    out = write_kv(**arguments, impl=impl)
    stored = arguments["kv"].flatten(1, 2)[:, slots]

    expected = {
        name: transformers_rotation(rms_norm(arguments[f"{name}_norm"], 1e-6)(x), positions, head_dim)
        for name, x in (("q", q), ("k", k))
    }
    # transformers rounds cosines, products and the sum to half precision; here the rotation is rounded once
    tolerance = dict(rtol=3e-6, atol=3e-6) if dtype == torch.float32 else dict(rtol=2e-3, atol=4e-3)
    torch.testing.assert_close(out, expected["q"], check_dtype=False, **tolerance)
    torch.testing.assert_close(stored[0], expected["k"], check_dtype=False, **tolerance)
    assert torch.equal(stored[1], v)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("skipped", ["none", "some", "all", "outside"])
def test_only_the_named_slots_change(skipped: str, impl: str) -> None:
    arguments = write_inputs(Maker.seeded(DEVICE), tokens=8, skipped=skipped)
    before = arguments["kv"].clone()
    write_kv(**arguments, impl=impl)
    slots = arguments["slots"]
    kv = arguments["kv"].flatten(1, 2)
    written = torch.zeros(kv.shape[1], dtype=torch.bool, device=kv.device)
    written[slots[(slots >= 0) & (slots < kv.shape[1])]] = True
    changed = (kv != before.flatten(1, 2)).any(-1).any(-1)
    assert torch.equal(changed, written.expand(2, -1))


@pytest.mark.parametrize("impl", IMPLS)
def test_layers_at_once_are_layers_one_by_one(impl: str) -> None:
    """The drafter's context equals what its own layers would have stored."""
    arguments = materialize_inputs(Maker.seeded(DEVICE), tokens=7, layers=3, skipped="some", fused=True)
    k, v, before = arguments["k"], arguments["v"], arguments["kv"].clone()
    materialize_kv(**arguments, impl=impl)
    for layer in range(3):
        alone = before[layer].clone()
        write_kv(
            q=k[:, layer],
            k=k[:, layer],
            v=v[:, layer],
            kv=alone,
            slots=arguments["slots"],
            positions=arguments["positions"],
            rope=arguments["rope"],
            q_norm=arguments["k_norm"][layer],
            k_norm=arguments["k_norm"][layer],
            eps=arguments["eps"],
            impl=impl,
        )
        torch.testing.assert_close(arguments["kv"][layer], alone, rtol=1e-6, atol=1e-6)


def test_scores_depend_on_the_distance_alone() -> None:
    """What a rotary embedding is for: the same shift of both positions leaves every q . k unchanged."""
    arguments = write_inputs(Maker.seeded(DEVICE), tokens=6, heads=(1, 1), positions=(0, 20))
    scores = []
    for shift in (0, 31):
        moved = arguments | dict(positions=arguments["positions"] + shift, kv=arguments["kv"].clone())
        q = write_kv(**moved, impl="triton")[:, 0]
        scores.append(q @ moved["kv"].flatten(1, 2)[0, arguments["slots"], 0].T)
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(k=torch.zeros(5, 3, 16)), r"v: expected shape \[5, 3, 16\]"),
        (dict(kv=torch.zeros(2, 3, 16, 2, 32)), r"kv: expected shape \[2, \*, \*, 2, 16\]"),
        (dict(slots=torch.zeros(5, dtype=torch.int32)), "slots: expected dtype torch.int64, got torch.int32"),
        (dict(positions=torch.zeros(4, dtype=torch.int64)), r"positions: expected shape \[5\], got \[4\]"),
        (dict(rope=torch.zeros(64, 8)), r"rope: expected shape \[\*, 16\], got \[64, 8\]"),
        (dict(rope=torch.zeros(64, 16, dtype=torch.float16)), "rope: expected dtype torch.float32"),
        (dict(q_norm=None), "both or neither"),
        (dict(q=torch.zeros(16, 4, 5).permute(2, 1, 0)), "q: expected adjacent heads"),
        (dict(v=torch.zeros(5, 2, 16, dtype=torch.float16)), "v: expected dtype torch.float32"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_kv(**(write_inputs(Maker.seeded("cpu"), tokens=5) | change))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(kv=torch.zeros(2, 2, 3, 16, 2, 16)), r"kv: expected shape \[3, 2, \*, \*, 2, 16\]"),
        (dict(v=torch.zeros(5, 3, 1, 16)), r"v: expected shape \[5, 3, 2, 16\]"),
        (dict(k_norm=torch.zeros(16)), r"k_norm: expected shape \[3, 16\], got \[16\]"),
    ],
)
def test_bad_layers_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        materialize_kv(**(materialize_inputs(Maker.seeded("cpu"), tokens=5) | change))
