"""Language models, as targets and as standalone drafts: config read and checked, then the weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from algorithms.models.architectures import ARCHITECTURES, find_architecture
from algorithms.models.config import DecoderConfig
from algorithms.models.decoder import Decoder
from algorithms.models.experts.config import ExpertsConfig
from algorithms.models.experts.scaled import quantise
from algorithms.models.folder import ModelError, read_json, resolve_folder
from algorithms.models.loading.stored import check_layers, stored_tensors
from algorithms.models.loading.weights import load_weights
from algorithms.models.scaled_linear import SUPPORTED, WeightFormat
from algorithms.models.tokenizer import TOKENIZER_FILE, Tokenizer

CONFIG_FILE = "config.json"
NEUTRAL = {"logit_scale": 1.0, "output_multiplier": 1.0, "input_embedding_scale": 1.0, "is_neox_style": True}
FOREIGN = (
    "is_neox_style", "logit_scale", "parallel_drafting", "pard_token", "ptd_token_id", "speculators_config",
    "speculators_model_type", "transformer_layer_config",
)  # fmt: skip
"""Keys by which other families of drafters say how they are to be read."""
OTHER_DRAFTER = "use the drafter that was trained for this target, or the target it was trained for"

Config = TypeVar("Config")


@dataclass(frozen=True)
class TargetFolder:
    """A folder with the config and the tensor names of a language model, which a drafter must fit."""

    config: DecoderConfig
    path: Path
    origin: str | None = field(default=None, kw_only=True)
    """How the published weights were changed, such as `dequantised Q4_1`: `weights_origin` in `config.json`."""
    weight_format: WeightFormat | None = field(default=None, kw_only=True)  # of weights that are stored in float8


@dataclass(frozen=True)
class Target(TargetFolder):
    """A target with its weights loaded. `weight_dtype` as asked for: its drafters are loaded so too."""

    model: Decoder
    weight_dtype: str = field(default="auto", kw_only=True)

    @property
    def device(self) -> torch.device:
        return self.model.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and the KV cache; norms and packed weights may have another."""
        return self.model.model.embed_tokens.weight.dtype


def load_target(
    path: str | Path | TargetFolder, device: torch.device | str, dtype: torch.dtype, weight_dtype: str = "auto"
) -> Target:
    """Load a language model for inference; ModelError where it cannot serve. `weight_dtype` as `runtime.weight_dtype`:
    fp8 and fp8_w8a16 quantise the layers' projections in blocks, unless stored so; auto leaves them."""
    found = path if isinstance(path, TargetFolder) else read_target(path)
    check_weight_dtype(found, weight_dtype)
    with torch.device("meta"):
        model = Decoder(found.config)
    ignored = {"lm_head.weight"} if found.config.tie_word_embeddings else set()
    ignored |= {name for name in stored_tensors(found.path, text_name) if _is_other(name, found.config)}
    weight_format = found.weight_format and replace(found.weight_format, float8_x=_asked(weight_dtype).float8_x)
    load_weights(model, found.path, device, dtype, ignored=ignored, rename=text_name, weight_format=weight_format)
    for name, parameter in model.named_parameters():
        if offset := norm_offset(name, found.config):
            parameter.data += offset
    if weight_dtype != "auto" and weight_format is None:
        quantise(model.model.layers, _asked(weight_dtype))
    return Target(
        found.config, found.path, model, origin=found.origin, weight_format=weight_format, weight_dtype=weight_dtype
    )


def fit_drafter(folder: Path, drafter: torch.nn.Module, target: Target) -> None:
    """Compare the vocabulary maps of a loaded drafter, let the target's embedding and LM head serve where its own are
    copies of them, and quantise its projections, its own LM head too, where that was asked for with the target."""
    if (d2t := getattr(drafter, "d2t", None)) is not None:
        check_vocabulary(folder, d2t, cast(torch.Tensor, drafter.t2d))
    head = target.model.lm_head or target.model.model.embed_tokens
    for name, other in (("embed_tokens", target.model.model.embed_tokens.weight), ("lm_head", head.weight)):
        own = getattr(drafter, name, None)
        if own is not None and own.weight.shape == other.shape and torch.equal(own.weight, other):
            setattr(drafter, name, None)
    if target.weight_dtype != "auto":
        quantise(drafter, _asked(target.weight_dtype))


def _asked(weight_dtype: str) -> WeightFormat:
    """The format of weights that are quantised as they are loaded."""
    return WeightFormat(float8_x=weight_dtype != "fp8_w8a16")


def norm_offset(name: str, config: DecoderConfig) -> int:
    """What a checkpoint has subtracted from the parameter `name`."""
    offset = find_architecture(config.architecture).norm_offset
    return int(offset and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"))


def read_target(path: str | Path) -> TargetFolder:
    """Find a language model and read its config and the names of its tensors; ModelError where it cannot serve."""
    folder = resolve_folder(path)
    raw = read_config(folder)
    config = parse_config(folder, raw, DecoderConfig.from_hf)
    # Packed experts are a kind of layer, which its own config describes.
    is_mxfp4 = any(getattr(mlp, "mxfp4", False) for mlp in config.mlps)
    weight_format = None if is_mxfp4 else read_weight_format(folder, raw)
    _check_language_model(folder, raw, config)
    found = TargetFolder(config, folder, origin=raw.get("weights_origin"), weight_format=weight_format)
    check_weight_dtype(found, "auto")
    return found


def load_draft(path: str | Path, target: Target, same_vocabulary: bool = True) -> Target:
    """Load the small language model that `read_draft` finds, with weights of the dtype asked for with the target."""
    draft = read_draft(path, target, same_vocabulary)
    return load_target(draft, target.device, target.dtype, target.weight_dtype)


def read_draft(path: str | Path, target: TargetFolder, same_vocabulary: bool = True) -> TargetFolder:
    """The folder of a language model, with the vocabulary of `target` if `same_vocabulary`. Both must have a tokenizer,
    because equal sizes do not prove equal vocabularies. ModelError names what does not fit."""
    draft = read_target(path)
    if kinds := {type(kind).__name__ for kind in draft.config.mixings if kind is not None}:
        raise ModelError(
            "the draft model has layers that no drafter runs",
            where=draft.path / CONFIG_FILE,
            expected="attention in all layers",
            actual=", ".join(sorted(kinds)),
            fix="use a draft model of attention layers",
        )
    if same_vocabulary:
        check_fit(draft.path, target, vocab_size=(target.config.vocab_size, draft.config.vocab_size))
    for place in (draft.path, target.path):
        if not (place / TOKENIZER_FILE).is_file():
            raise ModelError(
                "the vocabularies of draft and target cannot be compared",
                where=place,
                expected=TOKENIZER_FILE,
                fix="save the tokenizer beside weights: AutoTokenizer.from_pretrained(name).save_pretrained(folder)",
            )
    if same_vocabulary:
        check_tokenizer(draft.path, target.path)
    return draft


def read_config(folder: Path) -> dict[str, Any]:
    return read_json(folder / CONFIG_FILE, fix="give a Hugging Face model folder: config.json beside the weights")


def parse_config(folder: Path, raw: Mapping[str, Any], from_hf: Callable[[Mapping[str, Any]], Config]) -> Config:
    try:
        return from_hf(raw)
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
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


def check_vocabulary(folder: Path, d2t: torch.Tensor, t2d: torch.Tensor) -> None:
    """Compare the maps of a reduced vocabulary: `d2t [V_d]` int64 must hold offsets, and `t2d [V]` bool mark the ids
    that they lead to. If `d2t` held ids instead, the drafts would be valid tokens and wrong ones."""
    ids = (d2t + torch.arange(len(d2t), device=d2t.device)).cpu()
    marked = t2d.cpu().nonzero().squeeze(-1)
    if not torch.equal(ids, marked):
        raise ModelError(
            "the draft vocabulary contradicts itself",
            where=folder,
            expected=f"d2t[i] + i to be the {len(ids)} ids that t2d marks, in rising order",
            actual=f"t2d marks {len(marked)} ids, d2t leads to {ids[:4].tolist()}, ...",
            fix="restore d2t and t2d as the drafter was trained with",
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
    """ModelError where `entries` sets a key, `unsupported` or foreign, to what changes the computation."""
    given = {key: entries[key] for key in (*unsupported, *FOREIGN) if entries.get(key) is not None}
    found = [f"{key}={value}" for key, value in given.items() if (value != NEUTRAL[key] if key in NEUTRAL else value)]
    if found:
        raise ModelError(
            f"the drafter uses extensions of {kind} that are not supported",
            where=folder / CONFIG_FILE,
            actual=", ".join(found),
            fix=f"use a drafter of the original {kind} architecture",
        )


def read_weight_format(folder: Path, raw: Mapping[str, Any]) -> WeightFormat | None:
    """How the config says that weights are quantised; ModelError where that is not supported."""
    try:
        return WeightFormat.from_hf(raw)
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelError(
            "the weights are quantised in a way that is not supported: quantization_config",
            where=folder / CONFIG_FILE,
            expected=SUPPORTED,
            actual=str(error),
            fix="use the unquantised checkpoint; runtime.weight_dtype=fp8 quantises it as it is loaded",
        ) from error


def check_weight_dtype(found: TargetFolder, weight_dtype: str) -> None:
    """ModelError for float8 weights, stored or asked for, in layers that do not take them."""
    if found.weight_format is None and weight_dtype == "auto":
        return
    if any(isinstance(mlp, ExpertsConfig) and (mlp.mxfp4 or mlp.biased) for mlp in found.config.mlps):
        raise ModelError(
            "the target has layers that do not take float8 weights",
            where=found.path / CONFIG_FILE,
            expected="experts without biases, and not in MXFP4",
            actual=f"those of {found.config.architecture}",
            fix="use the unquantised checkpoint with runtime.weight_dtype=auto",
        )


def _check_language_model(folder: Path, raw: Mapping[str, Any], config: DecoderConfig) -> None:
    """Configs of drafters look like configs of language models, so the tensors decide."""
    names = sorted(stored_tensors(folder, text_name))
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
    check_layers(folder, [name for name in names if not _is_other(name, config)], "model.layers.", config.num_layers)


def text_name(name: str) -> str:
    """The name of a language model's tensor without what a model that also sees images puts before it."""
    return name.replace("model.language_model.", "model.", 1)


def _is_other(name: str, config: DecoderConfig) -> bool:
    """Whether a tensor belongs to the part that sees images, or to MTP layers in the target's own folder."""
    prefix = find_architecture(config.architecture).mtp_prefix
    is_mtp = prefix is not None and name.startswith(prefix.format(num_layers=config.num_layers))
    return is_mtp or name.startswith("model.visual.")
