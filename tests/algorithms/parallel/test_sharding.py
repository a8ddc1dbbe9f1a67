"""What a rank keeps of a model, and what it gives to kernels that exchange numbers with other ranks."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from algorithms.models.decoder import Decoder
from algorithms.parallel import layers
from algorithms.parallel.layers import RowParallelLinear
from algorithms.parallel.sharding import VocabParallelHead, shard
from tests.algorithms.toy import CONFIG, randomise

OPTIONS: dict[str, Any] = dict(qkv_bias=True, o_bias=True, mlp_bias=True, sinks=True, architecture="specdec")


def recorded(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """The calls of a function of the module."""
    calls: list[Any] = []
    monkeypatch.setattr(layers, name, lambda *given, **how: calls.append((given, how)) or name)
    return calls


@pytest.mark.parametrize("biased", [False, True])
def test_few_rows_are_exchanged_in_the_projection(monkeypatch: pytest.MonkeyPatch, biased: bool) -> None:
    """A projection with a bias, which one rank alone may add, is summed and then normed."""
    exchange = object()
    monkeypatch.setattr(layers, "exchange_of", lambda rows, width=None: exchange)
    fused, alone = (recorded(monkeypatch, name) for name in ("linear_all_reduce_add_rms_norm", "add_rms_norm"))
    monkeypatch.setattr(layers, "linear", lambda x, weight, **how: ("product", x, weight, how))
    monkeypatch.setattr(layers, "sum_in_order", lambda y: torch.full((4, 6), 7.0))
    part = RowParallelLinear(torch.nn.Linear(8, 6, bias=biased), slice(4, 8), slot=1)
    part.impl, part.batch_invariant = "triton", True
    x, residual, weight = torch.ones(4, 4), torch.zeros(4, 6), torch.full((6,), 2.0)
    part.add_rms_norm(x, residual, weight, 1e-5)
    if not biased:
        assert not alone
        (((*given, eps), how),) = fused
        wanted = (x, part.weight, exchange, 1, residual, weight)
        assert all(left is right for left, right in zip(given, wanted, strict=True)) and eps == 1e-5
        assert how == dict(batch_invariant=True, impl="triton")
    else:
        assert not fused
        (((summed, *given, eps), how),) = alone
        assert torch.equal(summed, 7.0 + part.bias.expand(4, 6)) and (eps, how) == (1e-5, dict(impl="triton"))
        assert given[0] is residual and given[1] is weight


@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_keeps_its_heads_columns_and_rows(tied: bool) -> None:
    config = replace(CONFIG, vocab_size=64, tie_word_embeddings=tied, **OPTIONS)
    whole = randomise(Decoder(config), 1)
    before = {name: value.clone() for name, value in whole.state_dict().items()}
    found = shard(whole, 1, 2)
    assert (found.config.num_heads, found.config.num_kv_heads, found.config.intermediate_size) == (2, 1, 24)
    outputs = {"q_proj": slice(32, 64), "k_proj": slice(16, 32), "v_proj": slice(16, 32)}
    for number, layer in enumerate(found.model.layers):
        attention, mlp, path = layer.self_attn, layer.mlp, f"model.layers.{number}."
        for owner, place, parts in (
            (attention, "self_attn.", outputs),
            (mlp, "mlp.", dict.fromkeys(("gate_proj", "up_proj"), slice(24, 48))),
        ):
            for name, rows in parts.items():
                projection = getattr(owner, name)
                for kind in ("weight", "bias"):
                    assert torch.equal(getattr(projection, kind), before[f"{path}{place}{name}.{kind}"][rows])
                assert projection.out_features == rows.stop - rows.start
        for projection, name, columns, slot in (
            (attention.o_proj, "self_attn.o_proj", slice(32, 64), 0),
            (mlp.down_proj, "mlp.down_proj", slice(24, 48), 1),
        ):
            assert isinstance(projection, RowParallelLinear) and projection.slot == slot
            assert torch.equal(projection.weight, before[f"{path}{name}.weight"][:, columns])
            assert torch.equal(projection.bias, before[f"{path}{name}.bias"])
        sinks = [value for name, value in before.items() if name.startswith(path) and "sinks" in name]
        assert torch.equal(attention.sinks, sinks[0][2:])
    table = before["model.embed_tokens.weight"]
    assert torch.equal(found.model.embed_tokens.weight, table)
    assert isinstance(found.lm_head, VocabParallelHead)
    assert torch.equal(found.lm_head.weight, (table if tied else before["lm_head.weight"])[32:])
