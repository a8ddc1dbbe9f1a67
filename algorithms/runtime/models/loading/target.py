"""Language models, as targets and as standalone drafts: config read and checked, then the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from algorithms.runtime.models.config import DecoderConfig, DFlashConfig, Eagle3Config, EagleConfig
from algorithms.runtime.models.decoder import Decoder
from algorithms.runtime.models.folder import ModelError, read_json, resolve_folder
from algorithms.runtime.models.loading.stored import stored_tensors
from algorithms.runtime.models.loading.weights import load_weights
from algorithms.runtime.models.registry import ARCHITECTURES
from algorithms.runtime.models.tokenizer import TOKENIZER_FILE, Tokenizer

CONFIG_FILE = "config.json"
NEUTRAL = {"logit_scale": 1.0, "output_multiplier": 1.0}
"""Keys that change nothing at this value."""
OTHER_DRAFTER = "use the drafter that was trained for this target, or the target it was trained for"

Config = TypeVar("Config", DecoderConfig, DFlashConfig, EagleConfig, Eagle3Config)


@dataclass(frozen=True)
class TargetFolder:
    """A folder whose config and tensor names are those of a language model: what a drafter must fit."""

    config: DecoderConfig
    path: Path
    origin: str | None = field(default=None, kw_only=True)
    """What became of the published weights, such as `dequantised Q4_1`: `weights_origin` in `config.json`."""


@dataclass(frozen=True)
class Target(TargetFolder):
    """A target with its weights loaded."""

    model: Decoder


def load_target(path: str | Path | TargetFolder, device: torch.device | str, dtype: torch.dtype) -> Target:
    """Load a language model's folder or hub name for inference; ModelError where it cannot serve."""
    found = path if isinstance(path, TargetFolder) else read_target(path)
    with torch.device("meta"):
        model = Decoder(found.config)
    ignored = {"lm_head.weight"} if found.config.tie_word_embeddings else set()
    load_weights(model, found.path, device, dtype, ignored=ignored)
    return Target(found.config, found.path, model, origin=found.origin)


def read_target(path: str | Path) -> TargetFolder:
    """Find a language model and read its config and the names of its tensors; ModelError where it cannot serve."""
    folder = resolve_folder(path)
    raw = read_config(folder)
    config = parse_config(folder, raw, DecoderConfig.from_hf)
    _check_target_keys(folder, raw)
    _check_language_model(folder, raw)
    return TargetFolder(config, folder, origin=raw.get("weights_origin"))


def load_draft(path: str | Path, target: Target, device: torch.device | str, dtype: torch.dtype) -> Target:
    """Load a small language model with the vocabulary of `target`; ModelError names what does not fit.

    Both folders must have a tokenizer, because equal sizes do not prove equal vocabularies.
    """
    return load_target(read_draft(path, target).path, device, dtype)


def read_draft(path: str | Path, target: TargetFolder) -> TargetFolder:
    """The folder of a language model with the vocabulary of `target`; no weights are read."""
    draft = read_target(path)
    check_fit(draft.path, target, vocab_size=(target.config.vocab_size, draft.config.vocab_size))
    for place in (draft.path, target.path):
        if not (place / TOKENIZER_FILE).is_file():
            raise ModelError(
                "the vocabularies of draft and target cannot be compared",
                where=place,
                expected=TOKENIZER_FILE,
                fix="save the tokenizer beside weights: AutoTokenizer.from_pretrained(name).save_pretrained(folder)",
            )
    check_tokenizer(draft.path, target.path)
    return draft


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a model folder."""
    return read_json(folder / CONFIG_FILE, fix="give a Hugging Face model folder: config.json beside the weights")


def parse_config(folder: Path, raw: Mapping[str, Any], from_hf: Callable[[Mapping[str, Any]], Config]) -> Config:
    """`from_hf(raw)`, with its errors as ModelError."""
    try:
        return from_hf(raw)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ModelError(
            "the model config cannot be used",
            where=folder / CONFIG_FILE,
            actual=str(error),
            fix="use a supported model, or restore the published config.json",
        ) from error


def check_fit(folder: Path, target: TargetFolder, **sizes: tuple[int, int]) -> None:
    """Compare `(target's, drafter's)` sizes: a drafter that does not fit may run and accept next to nothing."""
    for key, (expected, actual) in sizes.items():
        if expected != actual:
            raise ModelError(
                f"drafter and target do not fit: {key}",
                where=f"{folder / CONFIG_FILE}, against target {target.path}",
                expected=expected,
                actual=actual,
                fix=OTHER_DRAFTER,
            )


def check_tokenizer(folder: Path, target_folder: Path) -> None:
    """Compare two vocabularies by content, where both folders have a tokenizer."""
    if not all((place / TOKENIZER_FILE).is_file() for place in (folder, target_folder)):
        return
    expected, actual = Tokenizer.load(target_folder), Tokenizer.load(folder)
    if expected.fingerprint != actual.fingerprint:
        raise ModelError(
            "drafter and target do not fit: tokenizer",
            where=f"{folder / TOKENIZER_FILE}, against target {target_folder}",
            expected=f"the target's vocabulary: {expected.size} tokens, sha256 {expected.fingerprint[:16]}",
            actual=f"{actual.size} tokens, sha256 {actual.fingerprint[:16]}",
            fix=OTHER_DRAFTER,
        )


def refuse_extensions(folder: Path, kind: str, entries: Mapping[str, Any], unsupported: tuple[str, ...]) -> None:
    """ModelError where `entries` sets one of the `unsupported` keys to something that changes the computation."""
    found = [f"{key}={entries[key]}" for key in unsupported if entries.get(key) and entries[key] != NEUTRAL.get(key)]
    if found:
        raise ModelError(
            f"the drafter uses extensions of {kind} that are not supported",
            where=folder / CONFIG_FILE,
            actual=", ".join(found),
            fix=f"use a drafter of the original {kind} architecture",
        )


def _check_target_keys(folder: Path, raw: Mapping[str, Any]) -> None:
    """Refuse keys that change the computation and have no tensor that would show it."""
    # transformers 5 writes it beside the other rope parameters.
    partial = {**raw, **(raw.get("rope_parameters") or {})}.get("partial_rotary_factor", 1.0)
    asked = {
        f"partial_rotary_factor={partial}": partial != 1.0,
        "quantization_config": bool(raw.get("quantization_config")),
    }
    unsupported = [name for name, present in asked.items() if present]
    if unsupported:
        raise ModelError(
            "the target uses features that are not supported",
            where=folder / CONFIG_FILE,
            actual=", ".join(unsupported),
            fix="use an unquantised checkpoint with full rotary embeddings",
        )


def _check_language_model(folder: Path, raw: Mapping[str, Any]) -> None:
    """Configs of drafters look like those of language models, so the tensors decide."""
    names = sorted(stored_tensors(folder))
    fused = any(name.removeprefix("model.") == "fc.weight" for name in names)
    if fused or not any(name.startswith("model.layers.") for name in names):
        raise ModelError(
            "this is not a language model",
            where=folder,
            expected="tensors model.embed_tokens.weight and model.layers.*",
            actual=f"architectures {raw.get('architectures')}, tensors {', '.join(names[:4])}, ...",
            fix=f"give the folder of a language model ({', '.join(ARCHITECTURES)}); other drafters are for the "
            "algorithms they were trained for",
        )
