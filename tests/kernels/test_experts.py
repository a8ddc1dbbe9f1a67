"""Mixture of experts: bits that do not depend on other rows, the routing of published models, and what is refused."""

from typing import Any

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeConfig, GptOssConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from specdec_kernels.cases import Maker
from specdec_kernels.experts import (
    ExpertWeights,
    Routing,
    configs,
    expert_mlp,
    expert_mlp_add_rms_norm,
    route_and_schedule,
    route_experts,
    row_tile_of,
    schedule_experts,
)
from specdec_kernels.experts.cases import mlp_inputs, schedule_inputs
from specdec_kernels.norm import add_rms_norm
from tests.exact_products import add_products_in_order

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
EXPERTS, TOPK = 8, 3
HIDDEN, WIDTH = (640, 768) if torch.cuda.is_available() else (48, 40)
"""On a GPU few rows have the kernel of another number of rows on sm90."""


def layer(
    x: torch.Tensor, logits: torch.Tensor, weights: ExpertWeights, is_real: Any = None
) -> tuple[torch.Tensor, Any]:
    """(outputs, schedule) of a mixture of experts."""
    routed, schedule = route_and_schedule(logits, Routing(TOPK, renormalise=True), is_real=is_real, impl="triton")
    return expert_mlp(x, routed, schedule, weights, impl="triton"), schedule


def test_a_row_has_the_same_bits_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order, in batches of any size, beside rows that are no numbers, and beside rows that are not real."""
    add_products_in_order(monkeypatch)
    make = Maker.seeded(DEVICE, DTYPE)
    rows = 70
    x, logits = make.normal(rows, HIDDEN), make.normal(rows, EXPERTS)
    logits[20:] += torch.tensor([9.0] + [0.0] * (EXPERTS - 1), device=DEVICE).to(DTYPE)  # most rows choose expert 0
    weights = mlp_inputs(make, 1, EXPERTS, TOPK, HIDDEN, WIDTH)["weights"]
    whole, _ = layer(x, logits, weights)
    order = torch.randperm(rows, generator=make.generator).to(DEVICE)
    assert torch.equal(layer(x[order], logits[order], weights)[0], whole[order])
    for count in (1, 7, 17):
        assert torch.equal(layer(x[:count], logits[:count], weights)[0], whole[:count]), f"{count} rows"
    is_real = torch.arange(rows, device=DEVICE) % 4 == 0
    x[~is_real] = torch.nan
    found, schedule = layer(x, logits, weights, is_real)
    assert torch.equal(found[is_real], whole[is_real]) and not found[~is_real].any()
    touched = set(logits[is_real].float().topk(TOPK).indices.flatten().tolist())
    assert int(schedule.num_touched) == len(touched)


@pytest.mark.parametrize("rows", [1, 2, 3, 16])
def test_one_launch_is_both(rows: int) -> None:
    """The schedule that the routing of few rows writes is that of its experts."""
    logits = Maker.seeded(DEVICE, DTYPE).normal(rows, 45)
    is_real = torch.arange(rows, device=DEVICE) % 3 != 1
    routed, schedule = route_and_schedule(logits, Routing(6), is_real=is_real, impl="triton")
    for found, expected in zip(routed, route_experts(logits, Routing(6), is_real=is_real, impl="triton"), strict=True):
        assert torch.equal(found, expected)
    expected = schedule_experts(routed.experts, 45, schedule.row_tile, impl="triton")
    assert all(torch.equal(found, other) for found, other in zip(schedule[:-1], expected[:-1], strict=True))


def test_a_fused_norm_has_the_bits_of_two_launches() -> None:
    make = Maker.seeded(DEVICE, DTYPE)
    inputs, end = (
        mlp_inputs(make, 9, EXPERTS, TOPK, HIDDEN, WIDTH, "some"),
        (make.normal(9, HIDDEN), make.normal(HIDDEN)),
    )
    apart = add_rms_norm(expert_mlp(**inputs, impl="triton"), *end, 1e-6, impl="triton")
    fused = expert_mlp_add_rms_norm(**inputs, residual=end[0], norm_weight=end[1], eps=1e-6, impl="triton")
    assert all(torch.equal(*pair) for pair in zip(apart, fused, strict=True))
    with pytest.raises(ValueError, match=rf"residual: expected shape \[9, {HIDDEN}\], got \[1, {HIDDEN}\]"):
        expert_mlp_add_rms_norm(**inputs, residual=end[0][:1], norm_weight=end[1], eps=1e-6)


@pytest.mark.parametrize("rows", [1, 16, 33])
def test_items_hold_every_row_once(rows: int) -> None:
    """Whatever the tile: the rows of all items are all assignments, each at its expert."""
    inputs = schedule_inputs(Maker.seeded(DEVICE), rows, EXPERTS, TOPK, "some")
    for tile in (16, 64):
        schedule = schedule_experts(**inputs | dict(row_tile=tile), impl="triton")
        flat, seen = inputs["experts"].flatten(), []
        for expert, first, end in schedule.items[: int(schedule.num_items)].tolist():
            places = schedule.order[first:end].long()
            assert 0 < len(places) <= tile and bool((flat[places] == expert).all())
            seen += places.tolist()
        assert sorted(seen) == (flat < EXPERTS).nonzero().flatten().tolist()


def _small(config: Any, **changes: Any) -> Any:
    return config(num_experts_per_tok=3, hidden_size=32, **changes)


PUBLISHED = [
    pytest.param(Qwen3MoeTopKRouter(_small(Qwen3MoeConfig, num_experts=10, norm_topk_prob=True)),
                 Routing(3, renormalise=True), id="qwen3_moe"),
    pytest.param(Qwen3MoeTopKRouter(_small(Qwen3MoeConfig, num_experts=10, norm_topk_prob=False)), Routing(3),
                 id="qwen3_moe_raw"),
    pytest.param(GptOssTopKRouter(_small(GptOssConfig, num_local_experts=10)), Routing(3, "softmax_of_chosen"),
                 id="gpt_oss"),
    pytest.param(DeepseekV2TopkRouter(_small(DeepseekV2Config, n_routed_experts=12, topk_method="group_limited_greedy",
                                             n_group=4, topk_group=2, routed_scaling_factor=16.0)),
                 Routing(3, scale=16.0, groups=4, topk_groups=2), id="deepseek_v2"),
    pytest.param(DeepseekV3TopkRouter(_small(DeepseekV3Config, n_routed_experts=12, n_group=4, topk_group=2,
                                             routed_scaling_factor=2.5, norm_topk_prob=True)),
                 Routing(3, "sigmoid", True, 2.5, 4, 2, "two_best"), id="deepseek_v3"),
    pytest.param(Glm4MoeTopkRouter(_small(Glm4MoeConfig, n_routed_experts=12, n_group=1, topk_group=1,
                                          routed_scaling_factor=1.5, norm_topk_prob=True)),
                 Routing(3, "sigmoid", True, 1.5), id="glm4_moe"),
]  # fmt: skip


@pytest.mark.parametrize("router, routing", PUBLISHED)
def test_the_routing_of_published_models(router: torch.nn.Module, routing: Routing, impl: str) -> None:
    """The routers of transformers on logits without ties, with a correction bias that is not zero."""
    generator = torch.Generator().manual_seed(3)
    for tensor in router.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    with torch.no_grad():
        logits, weights, experts = router(torch.randn(40, 32, generator=generator))
    bias = getattr(router, "e_score_correction_bias", None)
    found = route_experts(logits.to(DEVICE), routing, None if bias is None else bias.to(DEVICE), impl=impl)
    dense, expected = (torch.zeros_like(logits) for _ in range(2))
    dense.scatter_(1, found.experts.cpu().long(), found.weights.cpu())
    torch.testing.assert_close(dense, expected.scatter_(1, experts, weights), rtol=1e-6, atol=1e-7)


def test_weights_have_the_dtype_of_the_logits() -> None:
    """Models that route in half precision round the weights; the sum of the outputs is float32."""
    logits = torch.randn(9, 16, generator=torch.Generator().manual_seed(1)).half()
    for impl in ("reference", "triton"):
        weights = route_experts(logits.to(DEVICE), Routing(4, renormalise=True), impl=impl).weights
        assert weights.dtype == torch.float32 and torch.equal(weights, weights.half().float())


def test_row_tiles_and_items_cover_the_largest_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """About twice the mean number of rows of an expert."""
    monkeypatch.setattr(configs, "current_chip", lambda tensor: "sm90")
    rows = {1: 16, 128: 16, 256: 32, 512: 64, 4096: 128}
    assert {count: row_tile_of(torch.zeros(count, 8, dtype=torch.int32), 128) for count in rows} == rows
