"""Configs that speculators (github.com/vllm-project/speculators) writes: the decoder's keys are nested, and target
layers are counted by the number of layers that have run."""

from collections.abc import Iterable, Mapping
from typing import Any

from algorithms.models.architectures import SLIDING
from algorithms.models.config_keys import nested

MODEL_TYPE = "speculators_model_type"
DECODER = "transformer_layer_config"
WRITER_KEYS = (MODEL_TYPE, "speculators_config", DECODER)


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the keys of its decoder beside its own, which win, and without those of the writer; a config of
    another writer stays as it is.

    `kind` is the model type: eagle3, peagle, dflash, dspark or mtp. `speculative_tokens` is added where a proposal
    method names it. A decoder without `model_type` is Qwen3's, and rotary parameters by layer type are those of sliding
    layers, as speculators reads them. Raises ValueError.
    """
    if config.get(MODEL_TYPE) is None:
        return dict(config)
    decoder = nested(config, DECODER)
    if not decoder:
        raise ValueError(f"{DECODER}: expected the decoder's keys, as speculators writes them, got none")
    own = {key: value for key, value in config.items() if key not in WRITER_KEYS and value is not None}
    flat = {"model_type": "qwen3", **decoder, **own, "kind": config[MODEL_TYPE]}
    by_layer_type = nested(flat, "rope_parameters").get(SLIDING)
    if by_layer_type is not None:
        flat["rope_parameters"] = by_layer_type
    methods = nested(config, "speculators_config").get("proposal_methods") or []
    tokens = [method["speculative_tokens"] for method in methods if "speculative_tokens" in method]
    return {**flat, "speculative_tokens": tokens[0]} if tokens else flat


def layer_outputs(layers_run: Iterable[int] | None, num_target_layers: int) -> tuple[int, ...]:
    """Ids of the layers whose output is read: after i layers that of layer i - 1; -1, the embedding, after none. Files
    that name none read a low, a middle and a high one."""
    chosen = (2, num_target_layers // 2, num_target_layers - 3) if layers_run is None else layers_run
    return tuple(int(count) - 1 for count in chosen)
