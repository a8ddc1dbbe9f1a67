"""The delta rule in chunks and the experts of training are the definitions of the kernels, gradients included."""

import pytest
import torch
from torch import Tensor

import specdec_kernels as kernels
from algorithms.models.config import DecoderConfig
from algorithms.models.decoder import Decoder
from algorithms.models.experts.module import Experts, imbalance, masked_expert_mlp
from algorithms.models.linear.config import LinearConfig
from algorithms.models.linear.module import LinearDenseMixer, LinearInputs, empty_state, of_layer
from specdec_kernels import DeltaWeights, ExpertWeights, Routed, Routing
from tests.algorithms.layer_kinds import KINDS
from tests.algorithms.tiny_folders import small_config

SIZES = LinearConfig(key_heads=2, value_heads=4, key_dim=8, value_dim=12, taps=4)


def linear_inputs(length: int, dtype: torch.dtype) -> list[Tensor]:
    """qkv, b, a, taps, A_log, dt_bias: decays from nearly one to nearly zero."""
    torch.manual_seed(length)
    heads, channels = SIZES.value_heads, SIZES.channels
    shapes = [(2, length, channels), (2, length, heads), (2, length, heads), (channels, SIZES.taps), (heads,), (heads,)]
    values = [torch.randn(shape, dtype=dtype) for shape in shapes]
    values[5] -= torch.linspace(0, 6, heads, dtype=dtype)
    return [value.requires_grad_() for value in values]


def in_chunks(qkv: Tensor, b: Tensor, a: Tensor, *weights: Tensor) -> Tensor:
    mixer = LinearDenseMixer(small_config(), SIZES, qkv.shape[1], "cpu")
    return mixer(0, LinearInputs(qkv, b, a, DeltaWeights(*weights)))


def recurrence(qkv: Tensor, b: Tensor, a: Tensor, *weights: Tensor) -> Tensor:
    """Token by token, by the definition of the kernels."""
    state = of_layer(empty_state(SIZES, 1, 1, qkv.dtype, "cpu"), 0)
    links, paths = kernels.chain_paths(torch.full((len(qkv),), -1), qkv.shape[1])
    flat = (part.flatten(0, 1) for part in (qkv, b, a))
    rows = kernels.delta_rule_inputs(*flat, DeltaWeights(*weights), state, links, impl="reference")
    return kernels.delta_rule(rows, paths, state, impl="reference").unflatten(0, qkv.shape[:2])


@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 130])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 4e-6)])
def test_chunks_are_the_recurrence(length: int, dtype: torch.dtype, tolerance: float) -> None:
    """Texts shorter than the convolution, at the edges of a chunk and over several."""
    given = linear_inputs(length, dtype)
    with torch.no_grad():
        found, expected = in_chunks(*given), recurrence(*given)
    assert found.shape == expected.shape and expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("length", [5, 70])
def test_gradients_of_chunks_are_those_of_the_recurrence(length: int) -> None:
    given = linear_inputs(length, torch.float64)
    weights = torch.randn(2, length, SIZES.value_heads, SIZES.value_dim, dtype=torch.float64)
    found, expected = (torch.autograd.grad((run(*given) * weights).sum(), given) for run in (in_chunks, recurrence))
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.abs().max() > 1e-3
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_strong_decay_leaves_gradients_finite() -> None:
    """Ratios of decays far beyond float32's range."""
    given = linear_inputs(130, torch.float32)
    with torch.no_grad():
        given[4] += 6
    grads = torch.autograd.grad(in_chunks(*given).sum(), given)
    assert all(torch.isfinite(grad).all() for grad in grads)


def test_chunks_keep_float32_under_autocast() -> None:
    """Mixed precision rounds what enters, not the states."""
    given = [value.detach() for value in linear_inputs(130, torch.float32)]
    rounded = [value.bfloat16() for value in given[:3]]
    with torch.autocast("cpu", torch.bfloat16):
        found = in_chunks(*rounded, *given[3:])
    expected = in_chunks(*rounded, *given[3:])
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)


def test_masked_experts_are_the_definition() -> None:
    """Output and gradients, with an expert that no row chooses and a row that has none."""
    torch.manual_seed(0)
    rows, hidden, width, count = 9, 8, 6, 5
    x, gate_up, down, logits = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((rows, hidden), (count, 2 * width, hidden), (count, hidden, width), (rows, count))
    )
    mask = torch.tensor([0.0, 0.0, 0.0, 0.0, -1e9], dtype=torch.float64)
    real = torch.arange(rows) != 4

    def routed() -> Routed:
        return kernels.route_experts(logits + mask, Routing(2, renormalise=True), None, real, impl="reference")

    weights, chosen = ExpertWeights(gate_up, down), routed()
    schedule = kernels.schedule_experts(chosen.experts, count, 16, impl="reference")
    outputs = [
        masked_expert_mlp(x, chosen, weights.gate_up, weights.down),
        kernels.expert_mlp(x, routed(), schedule, weights, impl="reference"),
    ]
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    given = (x, gate_up, down, logits)
    for ours, theirs in zip(*(torch.autograd.grad(out.square().sum(), given) for out in outputs), strict=True):
        assert theirs.abs().max() > 1e-3
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_imbalance_is_one_where_experts_are_chosen_alike() -> None:
    alike = torch.eye(4).repeat(2, 1) * 20
    routed = kernels.route_experts(alike, Routing(1), impl="reference")
    assert imbalance(alike, routed).item() == pytest.approx(1, abs=1e-6)
    same = alike[:1].expand(8, 4)
    assert imbalance(same, kernels.route_experts(same.contiguous(), Routing(1), impl="reference")).item() > 3.9


@pytest.mark.parametrize("kind", ["experts", "experts and latent", "linear and attention"])
def test_every_weight_learns_from_the_start(kind: str) -> None:
    """No gradient is missing or without effect once the branches, which begin at zero, have moved."""
    config: DecoderConfig = small_config(**KINDS[kind])
    model = Decoder(config)
    model.reset_parameters()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")):
            assert not parameter.any()
            torch.nn.init.normal_(parameter, std=0.1)
    from algorithms.models.dense_mixer import DenseMixer

    tokens = torch.randint(0, config.vocab_size, (4, 40))
    with torch.autocast("cpu", torch.bfloat16):
        hidden, _ = model(tokens, DenseMixer(config, 40, "cpu"))
        model.logits(hidden).float().logsumexp(-1).mean().backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert idle == []
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    assert all(layer.imbalance is not None and layer.imbalance < 3 for layer in layers)
