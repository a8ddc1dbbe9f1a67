"""Fused norm, rotation and store beyond case-by-case parity: an independent oracle, and untouched slots."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as rotate_glm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from specdec_kernels.cases import Maker
from specdec_kernels.kv_write import Llama3Scaling, YarnScaling, materialize_kv, rope_table, write_kv
from specdec_kernels.kv_write.cases import materialize_inputs, write_inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rms_norm(weight: torch.Tensor, eps: float) -> Qwen3RMSNorm:
    norm = Qwen3RMSNorm(weight.shape[0], eps).to(weight.device, weight.dtype)
    norm.weight.data.copy_(weight)
    return norm


def transformers_rotation(x: torch.Tensor, positions: torch.Tensor, head_dim: int) -> torch.Tensor:  # x [T, H, D]
    config = Qwen3Config(head_dim=head_dim, hidden_size=head_dim, num_attention_heads=1)
    embedding = Qwen3RotaryEmbedding(config).to(x.device)
    cos, sin = embedding(x[None].float(), positions[None])
    rotated, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    return rotated[0].transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_same_as_transformers(dtype: torch.dtype, impl: str) -> None:
    head_dim = 32
    make = Maker.seeded(DEVICE, dtype)
    arguments = write_inputs(make, tokens=9, heads=(6, 2), head_dim=head_dim)
    config = Qwen3Config()
    arguments["rope"] = rope_table(head_dim, 64, theta=config.rope_parameters["rope_theta"], device=DEVICE)
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


SCALINGS = {
    "llama3": (
        Llama3Scaling(factor=8.0, original_length=256, low_freq_factor=1.0, high_freq_factor=4.0),
        dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=256),
    ),
    "yarn": (YarnScaling(factor=4.0, original_length=512), dict(factor=4.0, original_max_position_embeddings=512)),
    "yarn_mscale": (
        YarnScaling(factor=40.0, original_length=512, mscale=1.0, mscale_all_dim=0.8, beta_fast=16.0),
        dict(factor=40.0, original_max_position_embeddings=512, mscale=1.0, mscale_all_dim=0.8, beta_fast=16),
    ),
    "yarn_smooth": (
        YarnScaling(factor=4.0, original_length=512, attention_factor=1.25, truncate=False),
        dict(factor=4.0, original_max_position_embeddings=512, attention_factor=1.25, truncate=False),
    ),
}
# No pair turns so seldom, so the ramp ends after the last one.
SELDOM = (
    YarnScaling(factor=4.0, original_length=512, beta_slow=1e-9),
    dict(factor=4.0, original_max_position_embeddings=512, beta_slow=1e-9),
)


@pytest.mark.parametrize("name", [*SCALINGS, "yarn_seldom"])
@pytest.mark.parametrize("head_dim, partial", [(64, 1.0), (96, 0.5)])
def test_tables_are_those_of_transformers(name: str, head_dim: int, partial: float) -> None:
    scaling, parameters = SCALINGS.get(name, SELDOM)
    rope_type = name.partition("_")[0]
    rules = dict(parameters, rope_type=rope_type, rope_theta=50000.0, partial_rotary_factor=partial)
    config = LlamaConfig(
        head_dim=head_dim, hidden_size=head_dim, num_attention_heads=1, max_position_embeddings=2048,
        rope_parameters=rules,
    )  # fmt: skip
    frequencies, amplitude = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    angles = torch.arange(2048).float()[:, None] * frequencies
    expected = torch.cat([angles.cos(), angles.sin()], dim=-1) * amplitude
    table = rope_table(int(head_dim * partial), 2048, 50000.0, scaling)
    # float32 frequencies may differ by a rounding, which position 2047 multiplies
    torch.testing.assert_close(table, expected, rtol=0, atol=2047 * 4e-7)


@pytest.mark.parametrize("change", [dict(rotary_dim=7), dict(rotary_dim=0), dict(max_positions=-1), dict(theta=0.0)])
def test_bad_tables_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        rope_table(**(dict(rotary_dim=8, max_positions=4) | change))


@pytest.mark.parametrize("rotary_dim", [32, 16])
def test_neighbours_turn_as_in_transformers(rotary_dim: int, impl: str) -> None:
    """GLM turns neighbouring elements of the first part of a head."""
    inputs = write_inputs(
        Maker.seeded(DEVICE), tokens=7, heads=(4, 2), head_dim=32, rotary_dim=rotary_dim, norm=False,
        interleaved=True,
    )  # fmt: skip
    cos, sin = inputs["rope"][inputs["positions"]].chunk(2, dim=-1)
    q, k = (inputs[name].transpose(0, 1)[None] for name in ("q", "k"))
    expected = rotate_glm(q, k, cos.repeat(1, 2)[None], sin.repeat(1, 2)[None])
    out = write_kv(**inputs, impl=impl)
    torch.testing.assert_close(out, expected[0][0].transpose(0, 1), rtol=1e-5, atol=1e-6)
    stored = inputs["kv"].flatten(1, 2)[0, inputs["slots"]]
    torch.testing.assert_close(stored, expected[1][0].transpose(0, 1), rtol=1e-5, atol=1e-6)


def test_e4m3_codes_are_the_nearest_even_ones(impl: str) -> None:
    """Every representable number, every midpoint between two, their neighbours in float32, and what lies
    beyond: bit for bit what torch rounds to after a clamp at 448."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    exact = torch.cat([codes, middles, torch.tensor([449.0, 464.0, 480.0, 1e30, 1e-30])])
    around = torch.cat([exact, exact.nextafter(torch.tensor(1e9)), exact.nextafter(torch.tensor(-1.0))])
    values = torch.cat([around, -around, torch.tensor([float("nan")])])
    values = torch.cat([values, values.new_zeros(-len(values) % 16)]).view(-1, 1, 16).to(DEVICE)
    tokens = len(values)
    kv = torch.zeros(2, tokens, 1, 1, 16, device=DEVICE).to(torch.float8_e4m3fn)
    slots = torch.arange(tokens, device=DEVICE)
    still = rope_table(2, 1, device=DEVICE)  # position 0 turns nothing
    write_kv(values, values, values, kv, slots, slots * 0, still, q_norm=None, k_norm=None, eps=0.0, impl=impl)
    expected = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    stored = kv.view(torch.uint8)[:, :, 0]
    number = ~values.isnan()
    assert torch.equal(stored[1][number], expected[number])
    assert torch.equal(stored[0][number] & 0x7F, expected[number] & 0x7F)  # -0 turns to 0
    assert (stored[:, ~number] & 0x7F == 0x7F).all()


@pytest.mark.parametrize("kind", ["number", "heads"])
def test_a_scaled_pool_gives_the_keys_back(kind: str, impl: str) -> None:
    """Stored code times scale is within half a step of the plain pool's entry, where it does not saturate."""
    inputs = write_inputs(Maker.seeded(DEVICE), tokens=9, heads=(4, 2), head_dim=32, fp8=kind)
    scales = [inputs.pop(name) for name in ("k_scale", "v_scale")]
    plain = inputs | dict(kv=inputs["kv"].float())
    write_kv(**plain, impl="reference")
    write_kv(**inputs, k_scale=scales[0], v_scale=scales[1], impl=impl)
    for plane, scale in enumerate(scales):
        wide = torch.as_tensor(scale, device=DEVICE).reshape(-1, 1)
        truth = plain["kv"][plane].flatten(0, 1)[inputs["slots"]]
        found = inputs["kv"][plane].float().flatten(0, 1)[inputs["slots"]] * wide
        limit = 448 * wide
        assert ((found - truth.clamp(-limit, limit)).abs() <= truth.abs() / 16 + wide * 2**-10).all()
    assert (inputs["kv"].float().abs() == 448).any(), "nothing saturates: the case tests too little"


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


def test_layers_at_once_are_layers_one_by_one(impl: str) -> None:
    """The drafter's context equals what its own layers would have stored."""
    arguments = materialize_inputs(Maker.seeded(DEVICE), tokens=7, layers=3, skipped="some", fused=True)
    k, v, before = arguments["k"], arguments["v"], arguments["kv"].clone()
    materialize_kv(**arguments, impl=impl)
    for layer in range(3):
        alone = before[layer].clone()
        norm = arguments["k_norm"][layer]
        shared = {name: arguments[name] for name in ("slots", "positions", "rope", "eps")}
        one = dict(q=k[:, layer], k=k[:, layer], v=v[:, layer], kv=alone, q_norm=norm, k_norm=norm)
        write_kv(**one, **shared, impl=impl)
        torch.testing.assert_close(arguments["kv"][layer], alone, rtol=1e-6, atol=1e-6)
