"""Keys of a `config.json`: stop tokens, and the rotary embedding as transformers 4 and 5 write it; its rotation; what
speculators nests."""

from typing import Any

import pytest
import torch

from algorithms.models.config import read_rope, write_rope
from algorithms.models.config_keys import read_eos, required, write_eos
from algorithms.models.layers import apply_rope
from algorithms.models.loading.speculators import flatten, layer_outputs
from specdec_kernels import LinearScaling, Llama3Scaling, YarnScaling

SCALINGS: dict[str, tuple[dict[str, Any], Any]] = {
    "none": ({}, None),
    "default": ({"rope_type": "default"}, None),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, None),
    "linear": ({"type": "linear", "factor": 2.0}, LinearScaling(2.0)),
    "llama3": (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 4.5},
        Llama3Scaling(8.0, 64, 1.5, 4.5),
    ),
    "yarn": ({"rope_type": "yarn", "factor": 4.0}, YarnScaling(4.0, 64)),
    "yarn in full": (
        {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0,
            "beta_slow": 2.0, "attention_factor": 1.5, "mscale": 0.5, "mscale_all_dim": 0.75, "truncate": False,
        },
        YarnScaling(4.0, 32, 16.0, 2.0, 1.5, 0.5, 0.75, False),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
def test_a_scaling_is_read_as_either_version_writes_it(name: str) -> None:
    """And what is written is read again."""
    keys, scaling = SCALINGS[name]
    for config in ({"rope_theta": 5e5, "rope_scaling": keys or None}, {"rope_parameters": {"rope_theta": 5e5, **keys}}):
        assert read_rope({**config, "max_position_embeddings": 64}) == (5e5, scaling)
        original = {"max_position_embeddings": 128, "original_max_position_embeddings": 64}
        assert read_rope(config | original) == (5e5, scaling)
    written = write_rope(5e5, scaling)
    assert read_rope(written) == (5e5, scaling)
    assert read_rope({"rope_theta": 5e5, "rope_scaling": written["rope_parameters"]}) == (5e5, scaling)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_type": "longrope"}, "rope type 'longrope' is not supported, expected one of default, dynamic, linear"),
        ({"rope_type": "linear"}, "key 'factor' is missing"),
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}, "key 'high_freq_factor' is missing"),
        ({"full_attention": {"rope_type": "default"}}, "of their own for full_attention are not supported"),
    ],
)
def test_what_cannot_be_read(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_rope({"rope_parameters": keys, "max_position_embeddings": 64})
    assert read_rope({}) == (10_000.0, None)


def test_pairs_are_half_a_head_apart() -> None:
    """A quarter turn takes (a, b) to (-b, a)."""
    table = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]])
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]], [[5.0, 6.0, 7.0, 8.0]]])
    turned = apply_rope(x, table, torch.tensor([1, 0]))
    assert turned.tolist() == [[[-3.0, 2.0, 1.0, 4.0]], [[5.0, 6.0, 7.0, 8.0]]]


@pytest.mark.parametrize(("written", "ids"), [(None, ()), (0, (0,)), (7, (7,)), ([7, 0, 3], (7, 0, 3))])
def test_tokens_that_end_a_text(written: Any, ids: tuple[int, ...]) -> None:
    assert read_eos({"eos_token_id": written}) == ids and write_eos(ids) == written
    assert read_eos({}) == () and read_eos({"eos_token_id": [5]}) == (5,)


def test_a_required_key_may_be_zero_and_must_be_there() -> None:
    assert required({"size": 0}, "size") == 0
    for config in ({}, {"size": None}):
        with pytest.raises(ValueError, match="model config: key 'size' is missing"):
            required(config, "size")


CONFIG: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}]},
    "transformer_layer_config": {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 5},
    "target_hidden_size": None,
    "block_size": 8,
}


def test_decoder_keys_come_beside_the_writers_own() -> None:
    assert flatten(CONFIG) == {
        "architectures": ["DFlashSpeculator"], "block_size": 8, "hidden_size": 64, "kind": "dflash",
        "model_type": "qwen3", "num_hidden_layers": 5, "speculative_tokens": 7,
    }  # fmt: skip


def test_decoder_says_its_own_type_and_rotary_parameters() -> None:
    decoder = {"model_type": "llama", "rope_parameters": {"sliding_attention": {"rope_theta": 5.0}, "full": {}}}
    flat = flatten({**CONFIG, "transformer_layer_config": decoder, "speculators_config": {}})
    assert (flat["model_type"], flat["rope_parameters"]) == ("llama", {"rope_theta": 5.0})
    assert "speculative_tokens" not in flat


def test_configs_of_other_writers_stay_as_they_are() -> None:
    assert flatten({"model_type": "qwen3", "block_size": 4}) == {"model_type": "qwen3", "block_size": 4}


@pytest.mark.parametrize("decoder", [None, {}, "qwen3"])
def test_a_config_without_decoder_is_refused(decoder: Any) -> None:
    with pytest.raises(ValueError, match="transformer_layer_config: expected"):
        flatten({**CONFIG, "transformer_layer_config": decoder})


def test_layers_are_counted_from_the_embedding() -> None:
    assert layer_outputs([0, 2, 36], 40) == (-1, 1, 35)
