"""gpt-oss: folders in both layouts of its experts, what the engine writes from them, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import specdec_kernels as kernels
from algorithms.dflash.drafting import DFlash
from algorithms.dflash.model import DFlashDrafter
from algorithms.lookup import NGram
from algorithms.models.dense_mixer import DenseMixer
from algorithms.models.experts.module import PackedExpertTensors
from algorithms.models.folder import ModelError
from algorithms.models.loading import Target, load_target, read_target
from specdec_kernels.experts import reference
from tests.algorithms.layer_kinds import check_drafts
from tests.algorithms.models.test_architectures import GPT_OSS, GPT_OSS_YARN, theirs
from tests.algorithms.tiny_folders import edit_json, small_config, small_dflash_config
from tests.algorithms.toy import Setup, autoregressive, engine_of, randomise, requests

LENGTH, TOLERANCE = 21, 1e-4
QUANTISED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
EXPERTS, WIDTH, HIDDEN = 6, 96, 64


def dequantised(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # slow to import

    return convert_moe_packed_tensors(blocks, scales, dtype=dtype)


def packed(name: str, rows: int, columns: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random blocks and scales of published checkpoints, of the size that keeps the variance."""
    blocks = torch.randint(0, 256, (EXPERTS, rows, columns // 32, 16), generator=generator).byte()
    scales = torch.randint(120, 123, (EXPERTS, rows, columns // 32), generator=generator).byte()
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with packed experts, and beside it `dense`, which transformers wrote, with the same numbers."""
    root = tmp_path_factory.mktemp("gpt_oss")
    shape = {"hidden_size": HIDDEN, "intermediate_size": WIDTH, "vocab_size": 61}
    model = theirs("gpt_oss", **{**GPT_OSS, **GPT_OSS_YARN, **shape, "max_position_embeddings": 128})
    generator = torch.Generator().manual_seed(5)
    blocks: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        for name, sizes in (("gate_up_proj", (2 * WIDTH, HIDDEN)), ("down_proj", (HIDDEN, WIDTH))):
            full = f"model.layers.{index}.mlp.experts.{name}"
            own = packed(full, *sizes, generator)
            blocks |= own
            dense = dequantised(*own.values(), torch.float32)
            getattr(layer.mlp.experts, name).data.copy_(dense)
    model.save_pretrained(root / "dense")
    model.save_pretrained(root / "packed")
    file = root / "packed/model.safetensors"
    kept = {name: value for name, value in load_file(file).items() if f"{name}_blocks" not in blocks}
    save_file(kept | blocks, file)
    edit_json(root / "packed/config.json", quantization_config=QUANTISED)
    return root


@torch.no_grad()
def logits(target: Target) -> torch.Tensor:
    tokens = torch.randint(0, 61, (2, LENGTH), generator=torch.Generator().manual_seed(4))
    return target.model.logits(target.model(tokens, DenseMixer(target.config, LENGTH, "cpu"))[0])


@torch.no_grad()
def test_packed_experts_are_those_that_transformers_dequantises(folder: Path) -> None:
    """Number for number, and in the logits; nothing is unpacked in memory."""
    from transformers import AutoModelForCausalLM

    ours, dense = (load_target(folder / name, "cpu", torch.float32) for name in ("packed", "dense"))
    held = ours.model.model.layers[1].mlp.experts
    assert isinstance(held, PackedExpertTensors) and held.gate_up_proj_blocks.dtype == torch.uint8
    assert held.gate_up_proj_blocks.shape == (EXPERTS, 2 * WIDTH, HIDDEN // 2)
    for packed_one, dense_one in zip(held.weights, dense.model.model.layers[1].mlp.experts.weights, strict=True):
        values = reference.as_tensor(packed_one, torch.float32)
        assert torch.equal(values, dense_one)
    model = AutoModelForCausalLM.from_pretrained(folder / "dense", attn_implementation="eager").eval()
    tokens = torch.randint(0, 61, (2, LENGTH), generator=torch.Generator().manual_seed(4))
    expected = model(tokens).logits
    assert expected.std() > 0.5
    for target in (ours, dense):
        assert (logits(target) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_codes_and_scales_are_those_of_transformers(dtype: torch.dtype) -> None:
    """All bytes at all scales, bit for bit; the largest overflow alike."""
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(1, 255, 16, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).reshape(1, 255, 1).expand(1, 255, 16).contiguous()
    expected = dequantised(blocks, scales, dtype).transpose(1, 2)
    found = reference.as_tensor(kernels.Mxfp4.padded(blocks.flatten(2), scales), dtype)
    assert torch.equal(found, expected) and bool(found.isinf().any())


SETUPS = {
    "pages of one": Setup(page_size=1, max_batch=2),
    "captured, chunks": Setup(graph="step", prefill_tile=4, prefill_chunk=8, max_batch=2),
    "kernels": Setup(impl="triton", fused=True, page_size=8, max_batch=2),
}


@pytest.mark.parametrize(
    ("layout", "name"), [("packed", "captured, chunks"), ("packed", "kernels"), ("dense", "pages of one")]
)
def test_drafts_do_not_change_the_text(folder: Path, monkeypatch: pytest.MonkeyPatch, layout: str, name: str) -> None:
    """Chains, trees and look-ups; contexts are longer than the windows."""
    target, setup = load_target(folder / layout, "cpu", torch.float32), SETUPS[name]
    if name == "kernels":
        check_drafts(target, requests(1, max_new_tokens=2), setup, decoys=(True,))
        return
    monkeypatch.setattr("algorithms.dflash.loading.load_dflash", lambda *_: drafter_of(target))
    drafters = [DFlash(DFlash.Config(topk=2, num_nodes=9), target, "random"), NGram(NGram.Config(), target, None)]
    check_drafts(target, requests(3, max_new_tokens=8), setup, drafters)


def drafter_of(target: Target) -> DFlashDrafter:
    """A random one, of the target's hidden size and vocabulary, for each run."""
    shape = small_config(vocab_size=61, hidden_size=HIDDEN, max_position_embeddings=128, eos_token_ids=())
    drafter = randomise(DFlashDrafter(small_dflash_config(shape, mask_token_id=60)), 1)
    assert isinstance(drafter, DFlashDrafter)
    return drafter


@pytest.mark.parametrize("layout", ["packed", "dense"])
def test_half_precision_keeps_norms_in_float32(folder: Path, layout: str) -> None:
    """And nothing else: caches and activations have the dtype that was asked for."""
    target = load_target(folder / layout, "cpu", torch.bfloat16)
    dtypes = {name: value.dtype for name, value in target.model.state_dict().items()}
    wide = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert wide == {name for name in dtypes if name.endswith("norm.weight")} and len(wide) == 9
    engine = engine_of(autoregressive(target), Setup(fused=True), target)
    assert (engine.parts.resources.dtype, engine.parts.resources.kv_dtype) == (torch.bfloat16, torch.bfloat16)
    written = engine.generate(requests(2, max_new_tokens=4)).completions
    assert all(len(completion.token_ids) == 4 for completion in written)


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "another method": ({"quantization_config": {"quant_method": "awq"}}, ("quantization_config",)),
    "experts kept": (
        {"quantization_config": QUANTISED | {"modules_to_not_convert": ["model.layers.0.mlp.experts"]}},
        ("modules_to_not_convert: expected all experts in mxfp4", "model.layers.0.mlp.experts"),
    ),
    "sizes": ({"intermediate_size": 100}, ("multiples of 32", "'intermediate_size': 100")),
    "width": ({"intermediate_size": 64}, ("experts.gate_up_proj", "has the wrong shape", "[6, 128")),
    "another model": ({"model_type": "llama", "layer_types": None, "sliding_window": None}, ("quantization_config",)),
    "unpacked": ({"quantization_config": None}, ("lack tensors", "experts.down_proj")),
    "too many": ({"num_experts_per_tok": 7}, ("expected 1 to 6 experts, got 7",)),
    "no experts": ({"num_local_experts": None}, ("'num_local_experts' is missing",)),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_refused_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Before a weight is read."""
    changes, said = REFUSED[name]
    config = json.loads((folder / "packed/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    (tmp_path / "model.safetensors").symlink_to(folder / "packed/model.safetensors")
    monkeypatch.setattr("algorithms.models.loading.weights._read", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(ModelError) as caught:
        load_target(read_target(tmp_path), "cpu", torch.float32)
    assert all(part in str(caught.value) for part in said), str(caught.value)


def test_scales_that_overflow_are_refused(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "packed/model.safetensors")
    tensors["model.layers.2.mlp.experts.down_proj_scales"][1, 2, 0] = 253
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "packed/config.json").read_text())
    with pytest.raises(ModelError, match="layers.2.mlp.experts.down_proj_scales' holds NaN or infinity"):
        load_target(tmp_path, "cpu", torch.float32)


def test_its_config_is_written_as_it_is_read(folder: Path) -> None:
    for name in ("packed", "dense"):
        config = read_target(folder / name).config
        assert type(config).from_hf(config.to_hf()) == config and config.sliding_windows == (5, None, 5, None)
