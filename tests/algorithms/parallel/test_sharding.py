"""What a rank keeps of a model of any kind of layers, that the parts add up to the whole, what kernels that
exchange numbers are given, and what cannot be split."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from algorithms.models.decoder import Decoder
from algorithms.models.dense_mixer import DenseMixer
from algorithms.models.experts.config import ExpertsConfig
from algorithms.models.experts.module import Experts, PackedExpertTensors
from algorithms.models.loading import read_target
from algorithms.parallel import layers
from algorithms.parallel.layers import RowParallelLinear, SummedExperts
from algorithms.parallel.sharding import VocabParallelHead, check_shareable, parallel_config, shard
from tests.algorithms.layer_kinds import EXPERTS, GROUPED, KINDS, LINEAR, SHARED, target_of
from tests.algorithms.tiny_folders import small_config, write_target
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


BIASED = ExpertsConfig(
    num_experts=6, topk=2, width=64, scoring="softmax_of_chosen", biased=True, limit=7.0, alpha=1.702
)
PACKED = replace(BIASED, mxfp4=True)
WORLD = 2


def drawn(model: Decoder) -> Decoder:
    """With packed weights drawn too."""
    generator = torch.Generator().manual_seed(7)
    for module in model.modules():
        if isinstance(module, PackedExpertTensors):
            for name, buffer in module.named_buffers():
                low, high = (118, 126) if name.endswith("scales") else (0, 256)
                buffer.copy_(torch.randint(low, high, buffer.shape, dtype=torch.uint8, generator=generator))
    return model


def experts_of(model: Decoder) -> Any:
    return model.model.layers[1].mlp


@pytest.mark.parametrize("same", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("sizes", [EXPERTS, GROUPED, SHARED, BIASED, PACKED], ids=str)
def test_parts_of_experts_add_up_to_the_whole(
    monkeypatch: pytest.MonkeyPatch, sizes: ExpertsConfig, same: bool
) -> None:
    """One sum of all that the layer gives."""
    summed: dict[str, list[torch.Tensor]] = {"sum_in_order": [], "sum_over_ranks": []}
    for name, given in summed.items():
        monkeypatch.setattr(layers, name, lambda out, given=given: given.append(out) or out)
    whole = drawn(randomise(Decoder(small_config(mlps=(None, sizes, sizes, sizes))), 5)).requires_grad_(False)
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    expected = experts_of(whole)(x)
    total = torch.zeros_like(x)
    for rank in range(WORLD):
        part = experts_of(shard(deepcopy(whole), rank, WORLD))
        assert isinstance(part, SummedExperts) and isinstance(part.part, Experts)
        part.batch_invariant = same
        total += part(x)
    torch.testing.assert_close(total, expected, atol=2e-5, rtol=2e-5)
    assert [len(given) for given in summed.values()] == ([WORLD, 0] if same else [0, WORLD])


@pytest.mark.parametrize("sizes", [EXPERTS, PACKED], ids=str)
def test_a_rank_holds_half_of_every_expert(sizes: ExpertsConfig) -> None:
    part = experts_of(shard(Decoder(small_config(mlps=(sizes,) * 4)), 1, WORLD)).part.experts
    gate_up, down = part.weights[:2]
    assert gate_up.shape == (6, sizes.width, 32) and down.shape == (6, 32, sizes.width // 2)
    for stored in (*part.parameters(), *part.buffers()):
        assert stored.is_contiguous() and stored.untyped_storage().nbytes() == stored.nbytes


def test_parts_of_a_delta_network_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "sum_over_ranks", lambda y: y)
    whole = target_of("linear and attention")
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))

    def mixed(model: Decoder) -> torch.Tensor:
        mixing = model.model.layers[0].mixing
        return mixing.out(mixing(0, x, DenseMixer(model.config, 9, "cpu")))

    expected = mixed(whole.model)
    parts = [shard(deepcopy(whole.model), rank, WORLD) for rank in range(WORLD)]
    torch.testing.assert_close(sum(mixed(part) for part in parts), expected, atol=2e-5, rtol=2e-5)
    own = parts[1].model.layers[0].mixing
    assert own.sizes == parts[1].config.mixing(0) == replace(LINEAR, key_heads=1, value_heads=2)
    assert own.conv1d.weight.shape[0] == own.in_proj_qkv.out_features == own.sizes.channels == LINEAR.channels // 2


@pytest.mark.parametrize(
    ("changes", "processes", "said"),
    [
        (dict(mixings=(LINEAR,) * 4), 4, "linear_num_key_heads: expected a multiple of 4, got 2"),
        (dict(mlps=(replace(EXPERTS, width=25),) * 4), 2, "experts' width: expected a multiple of 2, got 25"),
        (dict(mlps=(replace(SHARED, gated_shared=41),) * 4), 2, "shared expert's width: expected .* of 2, got 41"),
        (dict(mlps=(replace(PACKED, width=96),) * 4), 2, "MXFP4 experts: expected a width that 64 divides, got 96"),
        (dict(intermediate_size=47, mlps=(EXPERTS, EXPERTS, EXPERTS, None)), 2, "intermediate_size"),
    ],
)
def test_what_cannot_be_divided_is_refused(changes: dict[str, Any], processes: int, said: str) -> None:
    changes = {"num_kv_heads": 4, **changes}
    with pytest.raises(ValueError, match=f"runtime.tensor_parallel={processes} .*{said}"):
        parallel_config(small_config(**changes), processes)


def test_the_width_of_layers_that_all_have_experts_is_of_no_matter() -> None:
    assert parallel_config(small_config(intermediate_size=47, mlps=(EXPERTS,) * 4), 2).intermediate_size == 47


def test_a_folder_that_cannot_be_shared_is_refused_unread(tmp_path: Path) -> None:
    write_target(
        tmp_path, small_config(**{**KINDS["experts"], "architecture": "qwen3_moe", "qk_norm": True, "num_kv_heads": 1})
    )
    found = read_target(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    check_shareable(found, 1)
    with pytest.raises(ValueError, match="num_kv_heads: expected a multiple of 2, got 1"):
        check_shareable(found, 2)
