"""Block drafters from published folders: the family of each, and its config in the keys of `DFlashConfig`.

The families share tensor names and differ in conventions that their configs often leave out, such as the position that
a slot drafts. Sources: z-lab/dflash, deepseek-ai/DeepSpec, sgl-project/SpecForge, vllm-project/speculators and
hao-ai-lab/JetSpec; `docs/models.md` lists them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from algorithms.dflash.config import ANCHOR, DOMINO_PROJECTORS, NEXT, OWN, DFlashConfig
from algorithms.dflash.model import DFlashDrafter
from algorithms.models.config_keys import nested
from algorithms.models.folder import ModelError, resolve_folder
from algorithms.models.loading import speculators
from algorithms.models.loading import target as loading
from algorithms.models.loading.stored import check_layers, stored_tensors
from algorithms.models.loading.weights import load_weights
from algorithms.parallel.sharding import shard_drafter

DFLASH, DFLASH_2, DOMINO, DEEPSPEC, SPECFORGE_DSPARK, SPECULATORS = (
    "DFlash", "DFlash 2", "Domino", "DeepSpec", "SpecForge DSpark", "speculators"
)  # fmt: skip
SLOTS_BY_FAMILY = {DFLASH: OWN, DFLASH_2: OWN, DOMINO: OWN, DEEPSPEC: NEXT, SPECFORGE_DSPARK: NEXT, SPECULATORS: OWN}
"""Where no key says it. Files of speculators without the key are older than it."""
SPECULATORS_KINDS = ("dflash", "dspark", "dflash2")
SELECTOR_KEYS = ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")
PREFIXES = ("model.", "logit_head.")
GRU_HEAD = "gru_head."


def tensor_name(stored: str) -> str:
    for prefix in PREFIXES:
        stored = stored.removeprefix(prefix)
    return GRU_HEAD + stored if stored.startswith(("prefix_gru.", "embed_proj.")) else stored


def family_of(config: Mapping[str, Any], tensors: Iterable[str]) -> str:
    """The first family whose marks fit: `tensors` are asked before `architectures`, which converters rewrite."""
    architectures, own = config.get("architectures") or (), nested(config, "dflash_config")
    projector = own.get("projector_type")
    if "kind" in config:
        return SPECULATORS
    has_selector = any(name.startswith("candidate_selector.") for name in tensors)
    if has_selector or {**config, **own}.get("selector_rank") or "DFlash2DraftModel" in architectures:
        return DFLASH_2
    has_gru = any(name.startswith(GRU_HEAD) for name in tensors)
    if has_gru or projector in DOMINO_PROJECTORS or "DominoDraftModel" in architectures:
        return DOMINO
    training_keys = {"num_anchors", "enable_confidence_head", "markov_rank"} <= set(config)
    if "Qwen3DSparkModel" in architectures or (training_keys and "dflash_config" not in config):
        return DEEPSPEC
    if "DSparkDraftModel" in architectures or projector == "dspark":
        return SPECFORGE_DSPARK
    return DFLASH


def normalise(config: Mapping[str, Any], tensors: Iterable[str], num_target_layers: int) -> dict[str, Any]:
    """`config` of any family, flat, in the keys that `DFlashConfig.from_hf` reads, with `slots`. Raises ValueError."""
    flat = speculators.flatten(config)
    family = family_of(flat, tensors)
    merged = {"num_target_layers": num_target_layers, **flat, **nested(flat, "dflash_config")}
    merged.pop("dflash_config", None)
    if family == SPECULATORS:
        _rewrite_speculators(merged, num_target_layers)
    if family == DFLASH_2 and (missing := [key for key in SELECTOR_KEYS if not merged.get(key)]):
        raise ValueError(f"DFlash 2: expected the keys {', '.join(SELECTOR_KEYS)}, got no {', '.join(missing)}")
    if family == DOMINO:
        merged["projector_type"] = DOMINO_PROJECTORS[0]
    elif merged.get("projector_type") in ("dflash", "dspark"):
        del merged["projector_type"]
    if family == SPECFORGE_DSPARK:
        merged.setdefault("enable_confidence_head", float(merged.get("confidence_head_alpha") or 0) > 0)
    merged["slots"] = _slots_of(merged, family)
    return merged


def _rewrite_speculators(merged: dict[str, Any], num_target_layers: int) -> None:
    """Layers counted by those that have run, windows from the anchor, and sliding layers that see a whole block."""
    kind = merged["kind"]
    if kind not in SPECULATORS_KINDS:
        expected = ", ".join(SPECULATORS_KINDS)
        raise ValueError(f"{speculators.MODEL_TYPE}: expected one of {expected} for algo=dflash, got {kind}")
    if kind == "dflash2" and merged.get("sample_from_anchor"):
        raise ValueError("sample_from_anchor: expected false for dflash2, as speculators trains it, got true")
    ids = speculators.layer_outputs(merged.pop("aux_hidden_state_layer_ids", None), num_target_layers)
    merged |= {"target_layer_ids": ids, "window_origin": ANCHOR, "reads_final_norm": False}
    if merged.pop("sliding_window_non_causal", kind == "dflash2"):
        merged["causal"] = False


def _slots_of(merged: dict[str, Any], family: str) -> str:
    """What the keys say about slots; ValueError where they contradict each other."""
    said = {"slots": merged.get("slots")}
    keys = ("sample_from_anchor", "shift_label") if family == DOMINO else ("sample_from_anchor",)
    said |= {key: NEXT if merged.pop(key) else OWN for key in keys if merged.get(key) is not None}
    if not any(said.values()):
        said[f"{family} without {keys[-1]}"] = SLOTS_BY_FAMILY[family]
    if (drafts := merged.get("speculative_tokens")) is not None and "block_size" in merged:
        by_count = {merged["block_size"]: NEXT, merged["block_size"] - 1: OWN}
        said["speculative_tokens"] = by_count.get(drafts)
    found = {slots for slots in said.values() if slots is not None}
    if len(found) > 1:
        shown = ", ".join(f"{slots} by {key}" for key, slots in said.items() if slots is not None)
        raise ValueError(f"slots: expected one convention, got {shown}")
    return found.pop()


EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
VOCABULARY = ("d2t", "t2d")
UNSUPPORTED = (
    "add_swa_attention_sink_bias", "attention_sink_bias", "attention_value_scale", "shift_label",
)  # fmt: skip
"""Keys of families whose computation differs."""


def load_dflash(path: str | Path, target: loading.Target) -> DFlashDrafter:
    """Load a block drafter's folder or hub name that fits `target`; ModelError names what does not fit."""
    folder, config = read_dflash(path, target)
    with torch.device("meta"):
        drafter = DFlashDrafter(config)
    ignored = {*(VOCABULARY if drafter.d2t is None else ()), "verifier_lm_head.weight", "verifier_norm.weight"}
    load_weights(drafter, folder, target.device, target.dtype, ignored=ignored, rename=tensor_name)
    loading.fit_drafter(folder, drafter, target)
    shard_drafter(drafter)
    return drafter


def read_dflash(path: str | Path, target: loading.TargetFolder) -> tuple[Path, DFlashConfig]:
    """Folder and config of a block drafter that fits `target`; no weights are read."""
    folder = resolve_folder(path)
    raw, stored = loading.read_config(folder), stored_tensors(folder, tensor_name)
    entries = loading.parse_config(folder, raw, lambda config: normalise(config, stored, target.config.num_layers))
    if entries.get("mask_token_id") is None:
        raise ModelError(
            "this is not a DFlash drafter",
            where=folder / loading.CONFIG_FILE,
            expected="the key mask_token_id, in dflash_config or beside it",
            actual=f"architectures {raw.get('architectures')}",
            fix="give the drafter's folder as model.draft_path",
        )
    loading.refuse_extensions(folder, "DFlash", entries, UNSUPPORTED)
    config = loading.parse_config(folder, entries, DFlashConfig.from_hf)
    config = replace(config, owns_embedding=EMBEDDING in stored, owns_head=HEAD in stored)
    check_layers(folder, stored, "layers.", config.decoder.num_layers)
    sizes = {
        "hidden_size": (target.config.hidden_size, config.decoder.hidden_size),
        "vocab_size": (target.config.vocab_size, config.decoder.vocab_size),
        "num_target_layers": (target.config.num_layers, config.num_target_layers),
        "target_hidden_size": (target.config.hidden_size, entries.get("target_hidden_size", target.config.hidden_size)),
    }
    if not config.owns_head:
        sizes["draft_vocab_size without an LM head of its own"] = (target.config.vocab_size, config.num_known)
    loading.check_fit(folder, target, **sizes)
    loading.check_tokenizer(folder, target.path)
    return folder, config
