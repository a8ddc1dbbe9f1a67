"""Flattening of speculators' configs."""

from typing import Any

import pytest

from algorithms.models.loading.speculators import flatten, layer_outputs

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
