"""EAGLE, EAGLE-3 and P-EAGLE heads from published folders, many without an embedding or safetensors.

Writers rewrite `architectures`, so the tensors decide which kind of head a folder holds. They share tensor names and
differ in conventions:

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
from math import prod
from pathlib import Path
from typing import Any

import torch

from algorithms.drafting.level_drafter import NORMED, RAW
from algorithms.eagle.config import LAYER_IDS_KEY, Eagle3Config, EagleConfig
from algorithms.eagle.model import Eagle3Drafter, EagleDrafter
from algorithms.models.config_keys import nested, required
from algorithms.models.folder import ModelError, resolve_folder
from algorithms.models.loading import speculators
from algorithms.models.loading import target as loading
from algorithms.models.loading.stored import Stored, check_layers, stored_tensors, without_model
from algorithms.models.loading.weights import load_weights
from algorithms.parallel.sharding import shard_drafter

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
    layers_run = merged.get(LAYER_IDS_KEY) or None
    merged[LAYER_IDS_KEY] = speculators.layer_outputs(layers_run, num_target_layers)
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


EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
VERIFIER = {"verifier_lm_head.weight", "verifier_norm.weight"}
TENSORS = {
    EAGLE: "fc.weight and layers.*, no hidden_norm.weight",
    EAGLE3: "fc.weight, and midlayer.* or layers.0.hidden_norm.weight",
    P_EAGLE: "those of EAGLE-3 and mask_hidden, or a key that names a mask token",
}
UNSUPPORTED = (
    "input_embedding_scale", "causal_head", "enable_confidence_head", "final_logit_softcapping", "num_anchors",
    "projector_type", "sample_from_anchor",
)  # fmt: skip
"""Keys that change the logits, or say that the file is a block drafter's."""
UNSUPPORTED_EAGLE = (*UNSUPPORTED, "fc_norm", "norm_before_fc", "norm_before_residual")


def load_eagle(
    path: str | Path, target: loading.Target, kind: str | None = None, mask_token: int | None = None
) -> EagleDrafter | Eagle3Drafter:
    """Load a head and bind it to `target`. `kind`, one of `KINDS`, refuses the others; None takes EAGLE and
    EAGLE-3. `mask_token` is P-EAGLE's, where the folder names none. ModelError names what does not fit."""
    folder, config, stored = read_eagle(path, target, kind, mask_token)
    head: EagleDrafter | Eagle3Drafter
    ignored, rename = {HEAD}, without_model
    own_embedding, own_head = EMBEDDING in stored, HEAD in stored
    if isinstance(config, EagleConfig):
        with torch.device("meta"):
            head = EagleDrafter(config, own_embedding)
    else:
        mask_shape = stored[MASK_HIDDEN].shape if MASK_HIDDEN in stored else None
        with torch.device("meta"):
            head = Eagle3Drafter(config, target.config.num_layers, own_embedding, own_head, mask_shape)
        ignored, rename = VERIFIER if config.reduced else {*VERIFIER, "d2t", "t2d"}, eagle3_name
    load_weights(head, folder, target.device, target.dtype, ignored=ignored, rename=rename, pickles=True)
    head.bind(target.model)
    loading.fit_drafter(folder, head, target)
    shard_drafter(head)
    return head


def read_eagle(
    path: str | Path, target: loading.TargetFolder, kind: str | None = None, mask_token: int | None = None
) -> tuple[Path, EagleConfig | Eagle3Config, dict[str, Stored]]:
    """Folder, config and tensor headers of a head that fits, see `load_eagle`; of weights one norm is read at most."""
    folder = resolve_folder(path, pickles=True)
    raw = loading.read_config(folder)
    stored = stored_tensors(folder, without_model, pickles=True)
    flat = loading.parse_config(folder, raw, speculators.flatten)
    found = _checked_kind(folder, flat, stored, kind)
    if found == EAGLE:
        config: EagleConfig | Eagle3Config = _read_eagle1(folder, target, raw, stored)
    else:
        stored = {eagle3_name(name): tensor for name, tensor in stored.items()}
        config = _read_eagle3(folder, target, flat, stored, found, mask_token)
    loading.check_tokenizer(folder, target.path)
    return folder, config, stored


def _checked_kind(folder: Path, flat: Mapping[str, Any], stored: Mapping[str, Stored], wanted: str | None) -> str:
    found = kind_of(flat, stored)
    if found is not None and (found == wanted or (wanted is None and found != P_EAGLE)):
        return found
    wanted = wanted or EAGLE
    said = {"architectures": flat.get("architectures"), "speculators_model_type": flat.get("kind")}
    shown = ", ".join(f"{key} {value}" for key, value in said.items() if value is not None or key == "architectures")
    raise ModelError(
        f"this is not an {wanted} head" if wanted != P_EAGLE else "this is not a P-EAGLE head",
        where=folder,
        expected=f"tensors {TENSORS[wanted]}",
        actual=f"{shown}, tensors {', '.join(sorted(stored)[:4])}, ...",
        fix="give the head's folder as model.draft_path; EAGLE-3 heads are for algo=eagle3, P-EAGLE heads for "
        "algo=peagle, older ones for algo=eagle, DFlash drafters for algo=dflash",
    )


def _read_eagle1(
    folder: Path, target: loading.TargetFolder, raw: Mapping[str, Any], stored: Mapping[str, Stored]
) -> EagleConfig:
    loading.refuse_extensions(folder, EAGLE, raw, UNSUPPORTED_EAGLE)
    config = loading.parse_config(folder, raw, EagleConfig.from_hf)
    check_layers(folder, stored, "layers.", config.decoder.num_layers)
    vocab_size = target.config.vocab_size
    loading.check_fit(
        folder,
        target,
        hidden_size=(target.config.hidden_size, config.decoder.hidden_size),
        vocab_size=(vocab_size, config.decoder.vocab_size),
        draft_vocab_size=(vocab_size, int(raw.get("draft_vocab_size") or vocab_size)),
    )
    return config


def _read_eagle3(
    folder: Path,
    target: loading.TargetFolder,
    flat: Mapping[str, Any],
    stored: Mapping[str, Stored],
    kind: str,
    mask_token: int | None,
) -> Eagle3Config:
    num_layers = target.config.num_layers
    entries = loading.parse_config(folder, flat, lambda keys: normalise(keys, stored, kind, num_layers, mask_token))
    loading.refuse_extensions(folder, kind, entries, UNSUPPORTED)
    if (kind == P_EAGLE or entries.get("embed_requires_grad")) and EMBEDDING not in stored:
        raise ModelError(
            "the head was trained with an embedding of its own, and the weights have none",
            where=folder,
            expected=f"tensor {EMBEDDING}",
            fix="restore the tensor: the target's embedding would give other drafts",
        )
    config = loading.parse_config(folder, entries, Eagle3Config.from_hf)
    sizes = {
        "target_hidden_size": (target.config.hidden_size, config.target_hidden_size),
        "vocab_size": (target.config.vocab_size, config.decoder.vocab_size),
    }
    if EMBEDDING not in stored or HEAD not in stored:  # the target's serves, and must have the head's width
        sizes["hidden_size"] = (target.config.hidden_size, config.decoder.hidden_size)
    if HEAD not in stored:
        sizes["draft_vocab_size without an LM head of its own"] = (target.config.vocab_size, config.draft_vocab_size)
    if MASK_HIDDEN in stored:
        features = config.num_features * config.target_hidden_size
        sizes[f"values of {MASK_HIDDEN}"] = (features, prod(stored[MASK_HIDDEN].shape))
    loading.check_fit(folder, target, **sizes)
    try:
        config.layer_ids(num_layers)
    except ValueError as error:
        raise ModelError(
            "drafter and target do not fit: target layers",
            where=f"{folder / loading.CONFIG_FILE}, against target {target.path}",
            actual=str(error),
            fix=loading.OTHER_DRAFTER,
        ) from error
    return config
