"""Which kind of chain head a folder holds, and its config in the keys of `EagleConfig` and `Eagle3Config`.

Writers rewrite `architectures`, so tensors are asked first. They share tensor names and differ in conventions:

| writer | target layers | `norm_output` |
|---|---|---|
| SafeAILab, SpecForge before its pull request 879 | outputs | false: the LM head reads the raw stream |
| SpecForge since | outputs | true: the next level reads the normed stream |
| deepseek-ai/DeepSpec | outputs | absent |
| vllm-project/speculators | number of layers that have run | as SpecForge since 879 |

With `fc_norm` all writers mean the second. Sources: github.com/SafeAILab/EAGLE, sgl-project/SpecForge,
deepseek-ai/DeepSpec, vllm-project/speculators.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from algorithms.drafting.level_drafter import NORMED, RAW
from algorithms.eagle.config import LAYER_IDS_KEY
from algorithms.models.config_keys import nested, required
from algorithms.models.loading import speculators
from algorithms.models.loading.stored import Stored, without_model

EAGLE, EAGLE3, P_EAGLE = KINDS = ("EAGLE", "EAGLE-3", "P-EAGLE")
SPECULATORS_KINDS = {"eagle3": EAGLE3, "peagle": P_EAGLE}
MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
P_EAGLE_KEYS = ("pard_token", "ptd_token_id", "parallel_drafting")
MASK_HIDDEN, NORM = "mask_hidden", "norm.weight"
FIRST_LAYER = "midlayer."


def kind_of(config: Mapping[str, Any], tensors: Iterable[str]) -> str | None:
    """The kind of head of a flat config and the names of its tensors, without `model.`; None if it is none."""
    names = set(tensors)
    if "kind" in config:
        return SPECULATORS_KINDS.get(config["kind"])
    if "fc.weight" not in names:
        return None
    is_fused = "layers.0.hidden_norm.weight" in names or any(name.startswith(FIRST_LAYER) for name in names)
    if is_fused:
        marks = [MASK_HIDDEN in names, "PEagleDraftModel" in (config.get("architectures") or ())]
        marks += [config.get(key) not in (None, False) for key in P_EAGLE_KEYS]
        return P_EAGLE if any(marks) else EAGLE3
    has_layers = any(name.startswith("layers.") for name in names)
    return EAGLE if has_layers and not any("hidden_norm" in name for name in names) else None


def eagle3_name(name: str) -> str:
    """The head's name of a stored tensor: the first layer, which reads the embedding too, has a name of its own."""
    name = without_model(name)
    return FIRST_LAYER + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def normalise(
    config: Mapping[str, Any], stored: Mapping[str, Stored], kind: str, num_target_layers: int, mask_token: int | None
) -> dict[str, Any]:
    """The flat `config` of an EAGLE-3 or P-EAGLE head in the keys that `Eagle3Config.from_hf` reads. `stored` are its
    tensors by their names here; `mask_token` wins over the config's. Raises ValueError."""
    merged = {**config, **nested(config, "eagle_config")}
    merged.pop("eagle_config", None)
    _count_layers(merged, stored)
    if "kind" in merged:
        _read_speculators(merged, num_target_layers)
    elif "target_layer_ids" in merged:
        _read_deepspec(merged, num_target_layers)
    else:
        _read_norm_output(merged, stored, kind)
    _read_mask(merged, kind, mask_token)
    return merged


def _count_layers(merged: dict[str, Any], stored: Mapping[str, Stored]) -> None:
    """`num_hidden_layers` of the file: a config of one layer often repeats the target's."""
    further = {name.split(".")[1] for name in stored if name.startswith("layers.")}
    count, said = 1 + len(further), merged.get("num_hidden_layers")
    repeats_target = not further and any(
        each.name.removeprefix("model.").startswith(FIRST_LAYER) for each in stored.values()
    )
    if count != said and not repeats_target:
        raise ValueError(f"num_hidden_layers: expected the {count} layers that the weights have, got {said}")
    merged["num_hidden_layers"] = count
    if merged.get("layer_types"):
        merged["layer_types"] = merged["layer_types"][:count]


def _read_speculators(merged: dict[str, Any], num_target_layers: int) -> None:
    layers_run = merged.get(LAYER_IDS_KEY) or (2, num_target_layers // 2, num_target_layers - 3)
    merged[LAYER_IDS_KEY] = speculators.layer_outputs(layers_run)
    required(merged, "norm_before_residual")  # always written; readers disagree on its default
    merged |= {"feedback": NORMED if merged.pop("norm_output", False) else RAW, "logits": NORMED}


def _read_deepspec(merged: dict[str, Any], num_target_layers: int) -> None:
    ids, expected = merged.pop("target_layer_ids"), merged.get("num_target_layers", num_target_layers)
    if expected != num_target_layers:
        raise ValueError(f"num_target_layers: expected the target's {num_target_layers}, got {expected}")
    if num_target_layers - 1 in ids:
        raise ValueError(f"target_layer_ids: expected no last layer {num_target_layers - 1}, as DeepSpec, got {ids}")
    if merged["num_hidden_layers"] != 1:
        raise ValueError(f"num_hidden_layers: expected 1 for a head of DeepSpec, got {merged['num_hidden_layers']}")
    merged[LAYER_IDS_KEY] = ids


def _read_norm_output(merged: dict[str, Any], stored: Mapping[str, Stored], kind: str) -> None:
    """`norm_output` without `fc_norm`, whose meaning has changed. A norm that is not used is not trained: false means
    that the LM head reads the raw stream only where the norm's weights are all ones. P-EAGLE feeds nothing back."""
    norm_output = merged.get("norm_output")
    if norm_output is None or merged.get("fc_norm") or merged.get("feedback") is not None:
        return
    if norm_output and kind == P_EAGLE:
        return
    if norm_output:
        raise ValueError(
            "norm_output=true without fc_norm has two meanings: add feedback=raw to config.json for a head of EAGLE-3 "
            "itself, feedback=normed if the next level reads the normed stream"
        )
    is_trained = NORM in stored and not bool((stored[NORM].read() == 1).all())
    merged["logits"] = NORMED if is_trained else RAW


def _read_mask(merged: dict[str, Any], kind: str, mask_token: int | None) -> None:
    given = [merged.pop(key, None) for key in MASK_TOKEN_KEYS]
    for key in P_EAGLE_KEYS:
        merged.pop(key, None)
    if kind != P_EAGLE:
        return
    inner = nested(merged, "dflash_config").get("mask_token_id")
    found = [token for token in (mask_token, inner, *given) if token is not None]
    if not found:
        raise ValueError(
            f"the mask token is in none of the keys {', '.join(MASK_TOKEN_KEYS)}: set algo.mask_token to the id that "
            "the head was trained with"
        )
    merged["mask_token_id"] = int(found[0])
