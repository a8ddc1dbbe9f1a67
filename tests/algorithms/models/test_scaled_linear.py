"""Float8 weights: every code and scale is read as it is stored, packed weights keep the scales of their members, and
what is stored in another way is refused before weights are read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from algorithms.models.config import DecoderConfig
from algorithms.models.decoder import Decoder
from algorithms.models.dense_mixer import DenseMixer
from algorithms.models.layers import RMSNorm, SwiGLU
from algorithms.models.loading import load_target, read_target
from algorithms.models.loading.stored import stored_tensors
from algorithms.models.loading.target import check_weight_dtype
from algorithms.models.scaled_linear import ScaledLinear, WeightFormat, packed, quantised_blocks
from algorithms.parallel.sharding import check_shareable
from specdec_kernels.projection import reference
from specdec_kernels.projection.reference import dequantised as of_record
from tests.algorithms import scaled_folders
from tests.algorithms.layer_kinds import EXPERTS
from tests.algorithms.tiny_folders import change_weights, edit_json, refusal, write_target, write_weights

FORMATS = {"blocks": WeightFormat(), "rows": WeightFormat(by_row=True, scale_name="weight_scale")}


def scaled_linear(weight: torch.Tensor, kind: str = "blocks", bias: bool = False) -> ScaledLinear:
    """`weight` quantised, by blocks or by rows."""
    made = ScaledLinear(weight.shape[1], weight.shape[0], bias, FORMATS[kind])
    codes, scales = quantised_blocks(weight) if kind == "blocks" else scaled_folders.by_rows(weight)
    made.load_state_dict({"weight": codes, made.format.scale_name: scales}, strict=not bias)
    return made.requires_grad_(False)


@pytest.mark.parametrize("impl", [None, "triton"])
def test_every_finite_code_is_its_number(impl: str | None) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 0x7F != 0x7F].view(torch.float8_e4m3fn)
    linear = ScaledLinear(1, len(codes), False, replace(FORMATS["rows"], float8_x=False))
    linear.load_state_dict(dict(weight=codes[:, None], weight_scale=torch.ones(len(codes), 1)))
    linear.impl = impl
    found = linear(torch.ones(1, 1))[0]
    assert torch.equal(found, codes.float()) and len(found.unique()) == 253  # 254 codes, two of them zero
    assert found[1] == 2**-9 and found.max() == 448


@pytest.mark.parametrize("shape", [(576, 200), (128, 128), (5, 7), (129, 256)], ids=str)
def test_a_weight_is_quantised_in_blocks(shape: tuple[int, int]) -> None:
    """The largest number of a block becomes 448, zeros stay zeros, and no code is further than half a step."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[:3] = 0
    codes, scales = quantised_blocks(weight)
    assert codes.shape == shape and scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    found = scaled_folders.dequantised(codes, scales)
    assert not found[:3].any() and codes.float().abs().max() == 448
    step = torch.maximum(weight.abs() * 2**-4, scales.max() * 2**-10)  # half a step of three bits; of subnormals
    assert ((found - weight).abs() <= step * 1.001).all()
    assert torch.equal(quantised_blocks(found)[0].float(), codes.float())
    zeros = quantised_blocks(torch.zeros(130, 4))
    assert not zeros[0].float().any() and (zeros[1] == 1).all()


@pytest.mark.parametrize("kind", list(FORMATS))
@pytest.mark.parametrize("rows", [(128, 256, 128), (192, 96, 96), (576, 576), (45, 7, 30)], ids=str)
def test_packed_weights_keep_their_scales(kind: str, rows: tuple[int, ...]) -> None:
    """Where members begin at a block, inside of one, and at an odd row; the members' codes are views of the whole."""
    generator = torch.Generator().manual_seed(1)
    members = [scaled_linear(torch.randn(count, 300, generator=generator) * 2**i, kind) for i, count in enumerate(rows)]
    alone = torch.cat([of_record(member.scaled_weight) for member in members])
    whole = packed(members).weight
    assert torch.equal(of_record(whole), alone)
    assert whole.group_rows == (1 if kind == "rows" else {128: 128, 192: 32, 576: 64, 45: 1}[rows[0]])
    assert torch.equal(torch.cat([of_record(member.scaled_weight) for member in members]), alone)
    assert members[1].weight.data_ptr() == whole.codes[rows[0] :].data_ptr()


def test_projections_of_two_formats_are_not_packed() -> None:
    with pytest.raises(ValueError, match="weights of one format"):
        packed([scaled_linear(torch.ones(4, 4)), nn.Linear(4, 4)])


def logits_of(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    hidden, _ = model(tokens, DenseMixer(model.config, tokens.shape[1], "cpu"))
    return model.logits(hidden)


@pytest.mark.parametrize("kind", list(scaled_folders.CONFIGS))
@pytest.mark.parametrize("impl, weight_dtype", [(None, "auto"), ("triton", "auto"), ("triton", "fp8_w8a16")])
def test_a_folder_has_the_logits_of_its_dequantised_weights(
    tmp_path: Path, kind: str, impl: str | None, weight_dtype: str
) -> None:
    """And of inputs that are rounded to codes of 128 numbers each, but for W8A16."""
    transformers = pytest.importorskip("transformers")
    plain = scaled_folders.write_scaled_target(tmp_path / "scaled", kind)
    write_target(tmp_path / "plain", scaled_folders.scaled_config())
    write_weights(tmp_path / "plain", plain)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    target = load_target(tmp_path / "scaled", "cpu", torch.float32, weight_dtype)
    target.model.set_forward(impl)
    scaled = [name for name, part in target.model.named_modules() if isinstance(part, ScaledLinear)]
    for name in scaled if weight_dtype == "auto" else ():
        theirs.get_submodule(name).register_forward_pre_hook(with_rounded_input)
    tokens = torch.randint(272, (1, 9), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = theirs(tokens).logits
        torch.testing.assert_close(logits_of(target.model, tokens), expected, atol=1e-4, rtol=1e-4)
        # The error of the codes themselves is far larger.
        unlike = logits_of(load_target(written_plainly(tmp_path), "cpu", torch.float32).model, tokens)
        assert (unlike - expected).abs().max() > 1e-2


def with_rounded_input(layer: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    codes, scales = reference.rounded(inputs[0])
    return (codes.float() * scales.repeat_interleave(128, -1)[..., : codes.shape[-1]],)


def written_plainly(tmp_path: Path) -> Path:
    write_target(tmp_path / "original", scaled_folders.scaled_config())
    return tmp_path / "original"


@pytest.mark.parametrize("kind", list(scaled_folders.CONFIGS))
def test_only_what_is_stored_in_float8_is_scaled(tmp_path: Path, kind: str) -> None:
    """In float32 and in bfloat16, which the scales do not become."""
    plain = scaled_folders.write_scaled_target(tmp_path, kind)
    for dtype in (torch.float32, torch.bfloat16):
        model = load_target(tmp_path, "cpu", dtype).model
        scaled = {f"{name}.weight": part for name, part in model.named_modules() if isinstance(part, ScaledLinear)}
        assert len(scaled) == 3 * 7 - 1 and scaled_folders.PLAIN not in scaled
        for name, part in scaled.items():
            assert torch.equal(of_record(part.scaled_weight), plain[name]), name
        others = {name: tensor for name, tensor in model.state_dict().items() if name in plain.keys() - scaled.keys()}
        assert len(others) == len(plain) - len(scaled)
        assert all(torch.equal(tensor, plain[name].to(dtype)) for name, tensor in others.items())


def test_an_unquantised_folder_is_quantised_as_it_is_loaded(tmp_path: Path) -> None:
    written = write_target(tmp_path, scaled_folders.scaled_config()).state_dict()
    model = load_target(tmp_path, "cpu", torch.float32, "fp8").model
    for name, part in model.named_modules():
        assert isinstance(part, ScaledLinear) == name.endswith("_proj"), name
        if isinstance(part, ScaledLinear):
            expected = scaled_folders.dequantised(*quantised_blocks(written[f"{name}.weight"]))
            assert torch.equal(of_record(part.scaled_weight), expected)
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.1.input_layernorm.weight"):
        assert torch.equal(model.state_dict()[name], written[name])
    loaded = load_target(tmp_path, "cpu", torch.float32).model
    assert not any(isinstance(part, ScaledLinear) for part in loaded.modules())


def test_a_stored_float8_folder_is_not_quantised_again(tmp_path: Path) -> None:
    scaled_folders.write_scaled_target(tmp_path, "blocks")
    as_stored, asked = (load_target(tmp_path, "cpu", torch.float32, dtype).model for dtype in ("auto", "fp8"))
    assert as_stored.state_dict().keys() == asked.state_dict().keys()


@pytest.mark.parametrize("inner", [128, 200])
def test_gate_and_up_in_one_tensor(tmp_path: Path, inner: int) -> None:
    """Divided where the halves are of different blocks, and refused where they share one."""
    config = scaled_folders.scaled_config(intermediate_size=inner)
    plain = scaled_folders.write_scaled_target(tmp_path, "blocks", config)
    stored = {name: tensor.read() for name, tensor in stored_tensors(tmp_path).items()}
    for layer in range(3):
        for suffix in ("weight", "weight_scale_inv"):
            names = [f"model.layers.{layer}.mlp.{part}_proj.{suffix}" for part in ("gate", "up")]
            stored[names[0].replace("gate_proj", "gate_up_proj")] = torch.cat([stored.pop(name) for name in names])
    write_weights(tmp_path, stored)
    if inner % 128:
        refusal(lambda: load_target(tmp_path, "cpu", torch.float32), "lack tensors", "gate_proj.weight_scale_inv")
        return
    model = load_target(tmp_path, "cpu", torch.float32).model
    mlp = model.model.layers[0].mlp
    assert isinstance(mlp, SwiGLU) and isinstance(mlp.up_proj, ScaledLinear)
    assert torch.equal(of_record(mlp.up_proj.scaled_weight), plain["model.layers.0.mlp.up_proj.weight"])


def group(**changes: Any) -> dict[str, Any]:
    """compressed-tensors with other entries of its group."""
    changed = {**scaled_folders.ROWS["config_groups"]["group_0"], **changes}
    return {**scaled_folders.ROWS, "config_groups": {"group_0": changed}}


def weights(**changes: Any) -> dict[str, Any]:
    return group(weights={**scaled_folders.ROWS["config_groups"]["group_0"]["weights"], **changes})


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq'"),
        ({"quant_method": "awq", "bits": 4}, "quant_method 'awq'"),
        ({"quant_method": "mxfp4"}, "quant_method 'mxfp4'"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "weight_block_size None"),
        ({**scaled_folders.BLOCKS, "weight_block_size": [64, 128]}, "weight_block_size [64, 128]"),
        ({**scaled_folders.BLOCKS, "activation_scheme": "static"}, "activation_scheme 'static'"),
        ({**scaled_folders.BLOCKS, "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({**scaled_folders.ROWS, "format": "pack-quantized"}, "format 'pack-quantized'"),
        ({**scaled_folders.ROWS, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (
            {**scaled_folders.ROWS, "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format 'sparse-24-bitmask'",
        ),
        (weights(strategy="tensor"), "weights.strategy 'tensor'"),
        (weights(num_bits=4), "weights.num_bits 4"),
        (weights(type="int"), "weights.type 'int'"),
        (weights(strategy="block", block_structure=[64, 64]), "weights.block_structure [64, 64]"),
        (group(input_activations={"dynamic": False}), "input_activations.dynamic False"),
        (group(output_activations={"dynamic": True}), "output_activations"),
        ({**scaled_folders.ROWS, "config_groups": {}}, "config_groups"),
        ({**scaled_folders.ROWS, "config_groups": "all"}, "config_groups: expected a mapping"),
    ],
)
def test_another_quantisation_is_refused_by_name(tmp_path: Path, entries: dict[str, Any], said: str) -> None:
    """Before weights are read: the config is, the tensors are not."""
    scaled_folders.write_scaled_target(tmp_path, "blocks")
    edit_json(tmp_path / "config.json", quantization_config=entries)
    refusal(lambda: read_target(tmp_path), said, "quantization_config", "weight_block_size [128, 128]", "channel")


def test_blocks_of_compressed_tensors_have_another_name() -> None:
    entries = weights(strategy="block", block_structure=[128, 128])
    assert WeightFormat.from_hf({"quantization_config": entries}) == WeightFormat(scale_name="weight_scale")
    assert WeightFormat.from_hf({"quantization_config": scaled_folders.ROWS}) == FORMATS["rows"]
    assert WeightFormat.from_hf({"quantization_config": scaled_folders.BLOCKS}) == FORMATS["blocks"]
    assert WeightFormat.from_hf({"quantization_config": None}) is None


def test_layers_that_take_no_float8_are_refused(tmp_path: Path) -> None:
    write_target(tmp_path)
    found = read_target(tmp_path)
    for change in (dict(biased=True), dict(mxfp4=True)):
        layers = (replace(EXPERTS, **change),) * found.config.num_layers
        other = replace(found, config=replace(found.config, mlps=layers))
        check_weight_dtype(other, "auto")
        refusal(lambda other=other: check_weight_dtype(other, "fp8"), "do not take float8", "experts without biases")
        stored = replace(other, weight_format=FORMATS["blocks"])
        refusal(lambda stored=stored: check_weight_dtype(stored, "auto"), "do not take float8")


def test_processes_do_not_share_scales(tmp_path: Path) -> None:
    scaled_folders.write_scaled_target(tmp_path, "rows")
    found = read_target(tmp_path)
    check_shareable(found, 1)
    check_shareable(replace(found, weight_format=None), 2)
    refusal(lambda: check_shareable(found, 2), "runtime.tensor_parallel=2", "not divided")


def test_damaged_scales_and_codes_are_named(tmp_path: Path) -> None:
    scaled_folders.write_scaled_target(tmp_path, "blocks")
    name = "model.layers.0.self_attn.q_proj.weight"
    scales = name.replace(".", "__") + "_scale_inv"
    original = stored_tensors(tmp_path)[f"{name}_scale_inv"].read()

    def load() -> Any:
        return load_target(tmp_path, "cpu", torch.float32)

    for wrong, said in ((None, "lack tensors"), (original[:1].clone(), "wrong shape"), (original * torch.nan, "NaN")):
        change_weights(tmp_path, **{scales: wrong})
        refusal(load, said, f"{name}_scale_inv")
    codes = stored_tensors(tmp_path)[name].read().clone()
    codes.view(torch.uint8)[3, 4] = 0xFF
    change_weights(tmp_path, **{scales: original, name.replace(".", "__"): codes})
    refusal(load, "NaN", name)
    edit_json(tmp_path / "config.json", quantization_config=None)
    refusal(load, "hold tensors unknown", "weight_scale_inv")


def test_a_float8_head_is_refused(tmp_path: Path) -> None:
    scaled_folders.write_scaled_target(tmp_path, "blocks")
    change_weights(tmp_path, lm_head__weight=torch.zeros(272, 160).to(torch.float8_e4m3fn))
    refusal(lambda: load_target(tmp_path, "cpu", torch.float32), "lm_head.weight", "F8_E4M3")


def test_a_bias_is_not_scaled() -> None:
    weight = torch.randn(5, 7)
    linear = scaled_linear(weight, bias=True)
    assert linear.bias is not None
    linear.bias.data[:] = 3
    x = torch.tensor([448.0, 28, -3, 0, 1, 2, -4]).expand(2, 7).contiguous()  # codes already
    expected = x @ of_record(linear.scaled_weight).T + 3
    torch.testing.assert_close(linear(x), expected)
    linear.impl = "triton"
    torch.testing.assert_close(linear(x), expected)
    norm = RMSNorm(5, 1e-6)
    norm.impl = "triton"
    torch.testing.assert_close(norm.after(linear, x, torch.ones(2, 5)).residual, expected + 1)


def test_config_round_trip(tmp_path: Path) -> None:
    """The format is no part of the decoder's config."""
    scaled_folders.write_scaled_target(tmp_path, "blocks")
    found = read_target(tmp_path)
    assert isinstance(found.config, DecoderConfig) and found.config == scaled_folders.scaled_config()
    assert found.weight_format == FORMATS["blocks"]
