"""Targets against transformers, on random small checkpoints that transformers itself has saved: logits and captured
hidden states, prefill and then token by token, requests of unequal length on shuffled pages that hold rubbish."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.dflash.model import DFlashDrafter
from algorithms.models.config import DecoderConfig
from algorithms.models.layers import Mixer, MixerWeights
from algorithms.models.loading import load_target
from algorithms.models.rotary import rope_table
from specdec_kernels.attention import AttentionMetadata, paged_attention
from specdec_kernels.kv_index import token_slots
from specdec_kernels.kv_write import write_kv
from tests.algorithms.tiny_folders import (
    randomise,
    small_config,
    small_dflash_config,
    write_target,
)

LOGIT_TOLERANCE = 1e-4
RUBBISH = 100.0
"""Left by earlier requests in every slot: large enough to show in any output that reads it."""
LENGTH, PREFILL = 14, (5, 9)
"""Tokens of both requests, and how many of each are prefilled before the rest goes in one by one."""
VOCAB = 97
CAPTURE = (2, 0)
"""Out of order: features come in the order they are asked for."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_OPTIONS = {"beta_fast": 4.0, "beta_slow": 0.5, "mscale": 0.8, "mscale_all_dim": 1.3, "truncate": False}
ROPES = {
    "llama3": LLAMA3_ROPE,
    "linear": LINEAR_ROPE,
    "yarn": YARN_ROPE,
    "yarn options": YARN_ROPE | YARN_OPTIONS,
    "yarn attention factor": YARN_ROPE | {"attention_factor": 1.7},
}
TARGETS: dict[str, dict[str, Any]] = {
    "qwen3 heads of its own": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "qwen3 two queries a head": {"num_key_value_heads": 2, "head_dim": 32},
    "qwen3 four queries a head, bias": {"num_key_value_heads": 1, "attention_bias": True},
    "llama two queries a head, bias": {"num_key_value_heads": 2, "attention_bias": True, "head_dim": 32},
    "llama3 rope": {"num_key_value_heads": 1, "rope_parameters": LLAMA3_ROPE},
    "llama linear rope": {"rope_parameters": LINEAR_ROPE},
    "qwen3 yarn rope": {"num_key_value_heads": 2, "head_dim": 32, "rope_parameters": YARN_ROPE},
    "llama yarn rope with options": {"rope_parameters": YARN_ROPE | YARN_OPTIONS},
    "qwen3 yarn rope with an attention factor": {
        "num_key_value_heads": 4,
        "head_dim": 32,
        "rope_parameters": ROPES["yarn attention factor"],
    },
    "llama tied, mlp bias": {"num_key_value_heads": 4, "mlp_bias": True, "tie_word_embeddings": True},
    "qwen2 without windows": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama yarn rope whose ramp ends past the last pair": {"rope_parameters": YARN_ROPE | {"rope_theta": 1.7}},
    "llama dynamic rope": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}},
    "mistral without windows": {"num_key_value_heads": 1, "sliding_window": None},
}


@dataclass
class Cache:
    """KV pool of two requests on shuffled pages."""

    kv: Tensor
    page_table: Tensor
    rope: Tensor
    eps: float
    impl: str

    @classmethod
    def of(cls, config: DecoderConfig, page_size: int, impl: str, batch: int = 2, capacity: int = 32) -> Cache:
        pages = capacity // page_size
        shape = (config.num_layers, 2, batch * pages, page_size, config.num_kv_heads, config.head_dim)
        order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(5))
        return cls(
            torch.full(shape, RUBBISH),
            order.reshape(batch, pages).int(),
            rope_table(config, capacity),
            config.rms_norm_eps,
            impl,
        )

    def slots(self, start: Tensor, counts: Tensor, width: int) -> Tensor:
        slots = token_slots(self.page_table, start, counts, width, self.kv.shape[3], impl=self.impl)
        return slots.flatten()

    def mixer(self, lengths: Tensor, counts: Tensor, width: int, mode: str = "chain") -> Mixer:
        """For a forward over `[B, width]` tokens behind `lengths`, of which `counts` are real."""
        slots = self.slots(lengths, counts, width)
        positions = (lengths[:, None] + torch.arange(width)).flatten()

        def mix(layer: int, q: Tensor, k: Tensor, v: Tensor, weights: MixerWeights) -> Tensor:
            rotated = write_kv(
                q.flatten(0, 1),
                k.flatten(0, 1),
                v.flatten(0, 1),
                self.kv[layer],
                slots,
                positions,
                self.rope,
                q_norm=weights.q_norm,
                k_norm=weights.k_norm,
                eps=self.eps,
                impl=self.impl,
            )
            metadata = AttentionMetadata(self.page_table, lengths, mode, q_lens=counts)
            return paged_attention(rotated.view_as(q), self.kv[layer], metadata, impl=self.impl)

        return mix


@dataclass(frozen=True)
class Expected:
    """A checkpoint that transformers has saved, and what transformers computes with it."""

    folder: Path
    tokens: Tensor
    logits: Tensor
    hidden: tuple[Tensor, ...]
    page_size: int


@pytest.fixture(scope="module", params=list(TARGETS))
def expected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    from transformers import AutoConfig, AutoModelForCausalLM

    family = request.param.split()[0].replace("llama3", "llama")
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }
    config = AutoConfig.for_model(family, **{**shape, **TARGETS[request.param]})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomise(model, seed=11)
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder, max_shard_size="150KB")
    assert (folder / "model.safetensors.index.json").is_file()
    tokens = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        output = model(tokens, output_hidden_states=True)
    assert output.logits.std() > 1, "logits that hardly vary would agree by chance"
    page_size = (1, 16)[list(TARGETS).index(request.param) % 2]
    return Expected(folder, tokens, output.logits, output.hidden_states, page_size)


def check_against_transformers(expected: Expected, impl: str) -> None:
    """Prefill both requests to different lengths in one forward, then feed the rest one token at a time."""
    target = load_target(expected.folder, "cpu", torch.float32)
    cache = Cache.of(target.config, expected.page_size, impl)
    lengths, counts = torch.zeros(2, dtype=torch.int64), torch.tensor(PREFILL, dtype=torch.int32)
    tokens = expected.tokens[:, : max(PREFILL)]
    while True:
        with torch.no_grad():
            hidden, features = target.model(tokens, cache.mixer(lengths, counts, tokens.shape[1]), CAPTURE)
            check_step(expected, lengths, counts, target.model.logits(hidden), features)
        lengths, counts = lengths + counts, torch.ones(2, dtype=torch.int32)
        if lengths.max() == LENGTH:
            return
        tokens = expected.tokens.gather(1, lengths[:, None])


def check_step(expected: Expected, lengths: Tensor, counts: Tensor, logits: Tensor, features: list[Tensor]) -> None:
    """Compare the rows in use, `counts` of each request behind `lengths`, with what transformers computed."""
    for row, (start, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        seen = slice(start, start + count)
        difference = (logits[row, :count] - expected.logits[row, seen]).abs().max()
        assert difference < LOGIT_TOLERANCE, f"row {row}, positions {seen}: logits differ by {difference}"
        for layer, feature in zip(CAPTURE, features, strict=True):
            difference = (feature[row, :count] - expected.hidden[layer + 1][row, seen]).abs().max()
            assert difference < LOGIT_TOLERANCE, f"layer {layer}: hidden states differ by {difference}"


def test_target_agrees_with_transformers(expected: Expected) -> None:
    check_against_transformers(expected, "reference")


@pytest.mark.parametrize("expected", ["qwen3 two queries a head"], indirect=True)
def test_target_agrees_with_transformers_on_the_kernels(expected: Expected) -> None:
    check_against_transformers(expected, impl="triton")


@torch.no_grad()
@pytest.mark.parametrize("expected", ["qwen3 two queries a head"], indirect=True)
def test_dflash_reads_what_transformers_calls_hidden_states(expected: Expected) -> None:
    """z-lab's code takes `hidden_states[layer + 1]`, which for the last layer stands behind the final norm."""
    target, layers = load_target(expected.folder, "cpu", torch.float32), (3, 1)
    shape = small_dflash_config(target.config, target_layer_ids=layers)
    drafter = DFlashDrafter(shape).requires_grad_(False)
    randomise(drafter, seed=2)
    counts, start = torch.full((2,), LENGTH, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    mixer = Cache.of(target.config, 16, "reference").mixer(start, counts, LENGTH)
    hidden, features = target.model(expected.tokens, mixer, layers)
    read = torch.cat([expected.hidden[layer + 1] for layer in layers], -1)
    wanted = drafter.hidden_norm(drafter.fc(read))
    torch.testing.assert_close(drafter.context(features, hidden), wanted, atol=LOGIT_TOLERANCE, rtol=1e-4)
    assert (expected.hidden[4] - features[0]).abs().max() > 0.1, "the norm makes no difference"


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_transformers_loads_what_the_toolkit_writes(tmp_path: Path, architecture: str) -> None:
    from transformers import AutoModelForCausalLM

    config = small_config(architecture, tie_word_embeddings=True, rope_theta=1e6)
    write_target(tmp_path, config)
    tokens = torch.randint(0, config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(4))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    ours = load_target(tmp_path, "cpu", torch.float32)
    counts = torch.full((2,), 9, dtype=torch.int32)
    mixer = Cache.of(ours.config, 16, "reference").mixer(torch.zeros(2, dtype=torch.int64), counts, 9)
    with torch.no_grad():
        logits = ours.model.logits(ours.model(tokens, mixer)[0])
        assert (logits - theirs(tokens).logits).abs().max() < LOGIT_TOLERANCE
