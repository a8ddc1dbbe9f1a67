"""Fused norms and the gated activation: the roundings of what they replace, and rows that stand alone."""

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from specdec_kernels.cases import Maker
from specdec_kernels.norm import add_rms_norm, embed_join_rms_norm, embed_rms_norm, rms_norm
from specdec_kernels.norm.cases import add_inputs, join_inputs, norm_inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def units_between(left: torch.Tensor, right: torch.Tensor) -> int:
    """The largest distance of two float16 tensors of equal signs, in representable numbers."""
    return int((left.view(torch.int16).int() - right.view(torch.int16).int()).abs().max())


def test_same_roundings_as_transformers(impl: str) -> None:
    """The scaled row is rounded before the weight. Without that, most entries differ by a unit or two; with it, only
    those where the order of the sum moves a value over the edge between two numbers."""
    inputs = norm_inputs(Maker.seeded(DEVICE, torch.float16), 9, 576)
    theirs = Qwen3RMSNorm(576, eps=inputs["eps"]).to(DEVICE, torch.float16)
    theirs.weight.data = inputs["weight"]
    expected, out = theirs(inputs["x"]), rms_norm(**inputs, impl=impl)
    assert (out != expected).float().mean() < 0.01 and units_between(out, expected) <= 2


def test_a_float32_weight_multiplies_before_the_rounding(impl: str) -> None:
    """As in gpt-oss, whose norm rounds once; after an addition and an embedding alike."""
    inputs = norm_inputs(Maker.seeded(DEVICE, torch.float16), 9, 576, wide=True)
    theirs = GptOssRMSNorm(576, eps=inputs["eps"]).to(DEVICE)
    theirs.weight.data = inputs["weight"]
    expected, out = theirs(inputs["x"]), rms_norm(**inputs, impl=impl)
    assert out.dtype == torch.float16 and (out != expected).float().mean() < 0.01 and units_between(out, expected) <= 1
    before = rms_norm(**inputs | dict(weight=inputs["weight"].half()), impl=impl)
    assert (before != out).float().mean() > 0.1
    zeros, end = torch.zeros_like(inputs["x"]), (inputs["weight"], inputs["eps"])
    assert torch.equal(add_rms_norm(zeros, inputs["x"], *end, impl=impl).normed, out)
    tokens = torch.arange(9, device=DEVICE)
    assert torch.equal(embed_rms_norm(tokens, inputs["x"], *end, impl=impl).normed, out)


def test_the_sum_is_rounded_before_the_norm(impl: str) -> None:
    inputs = add_inputs(Maker.seeded(DEVICE, torch.float16), 5, 64, scale=100.0)
    before = inputs["residual"].clone()
    normed, total = add_rms_norm(**inputs, impl=impl)
    assert torch.equal(total, inputs["x"] + before) and torch.equal(inputs["residual"], before)
    assert torch.equal(normed, rms_norm(total, inputs["weight"], inputs["eps"], impl=impl))


@pytest.mark.parametrize("columns", [None, 4])
def test_joined_norms_have_the_bits_of_the_single_ones(columns: int | None, impl: str) -> None:
    inputs = join_inputs(Maker.seeded(DEVICE, torch.float16), 3, 7, columns=columns, width=96)
    feature, sources, eps = inputs["feature"], inputs["sources"], inputs["eps"]
    if sources is not None:
        feature = torch.stack([feature[row, sources[row]] for row in range(3)])
    embedded = embed_rms_norm(inputs["tokens"], inputs["table"], inputs["weight"], eps, impl=impl).normed
    normed = rms_norm(feature, inputs["feature_weight"], eps, impl=impl)
    both, residual = embed_join_rms_norm(**inputs, impl=impl)
    assert torch.equal(residual, feature) and torch.equal(both, torch.cat([embedded, normed], -1))
