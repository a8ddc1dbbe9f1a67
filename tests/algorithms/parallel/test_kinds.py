"""The parts of layers with experts or states add up to the whole, and what cannot be split is refused."""

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
from algorithms.parallel.layers import SummedExperts
from algorithms.parallel.sharding import check_shareable, parallel_config, shard
from tests.algorithms.layer_kinds import EXPERTS, GROUPED, KINDS, LINEAR, SHARED, target_of
from tests.algorithms.tiny_folders import small_config, write_target
from tests.algorithms.toy import randomise

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
