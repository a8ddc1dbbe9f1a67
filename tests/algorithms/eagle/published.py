"""EAGLE, EAGLE-3 and P-EAGLE heads of random weights in the layouts of their writers, and what they compute, spelled
out from the equations: one request, no cache, no batch, float64."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.algorithms.dflash.published import (
    DECODER,
    HIDDEN,
    MASK,
    head_of_target,
    hidden_states,
    layer_shapes,
    rms,
    self_attention,
    swiglu,
)
from tests.algorithms.drafters import DEEP_TARGET as TARGET
from tests.algorithms.tiny_folders import write_json
from tests.algorithms.toy import DEEP_CONFIG as CONFIG
from tests.algorithms.toy import VOCAB

LLAMA = {**DECODER, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
KNOWN = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:37].sort().values


@dataclass(frozen=True)
class Head:
    """A head's folder, and the conventions of its writer."""

    config: dict[str, Any]
    hidden_states: tuple[int, ...]
    """What the head reads, as indices of transformers' `hidden_states`; negative: the last layer's output before the
    final norm."""
    first: str = "layers.0."
    layers: int = 1
    qk_norm: bool = False
    feature_norm: str | None = None
    normed_residual: bool = False
    normed_feedback: bool = False
    raw_logits: bool = False
    known: Tensor | None = None
    own: tuple[str, ...] = ()
    """Which of embedding and LM head are not the target's."""
    copies: tuple[str, ...] = ()
    """Tensors that repeat the target's."""
    mask_shape: tuple[int, ...] | None = None
    prefix: str = ""
    is_first: bool = False
    """EAGLE, whose layer reads a projection of embedding and feature and has one norm."""
    added: dict[str, Tensor] = field(default_factory=dict)

    @property
    def in_one_pass(self) -> bool:
        return self.mask_shape is not None

    @property
    def features(self) -> int:
        return len(self.hidden_states)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        if self.is_first:
            layer = {key: shape for key, shape in layer_shapes(1, self.qk_norm).items() if key != "input_layernorm"}
            shapes = {"fc.weight": (HIDDEN, 2 * HIDDEN), "fc.bias": (HIDDEN,)}
            shapes |= {f"{name}.weight": (VOCAB, HIDDEN) for name in self.own}
            return shapes | {f"layers.0.{key}.weight": shape for key, shape in layer.items()}
        shapes = {"fc.weight": (HIDDEN, self.features * HIDDEN), "norm.weight": (HIDDEN,)}
        if self.feature_norm == "joint":
            shapes["input_norm.weight"] = (self.features * HIDDEN,)
        if self.feature_norm == "each":
            shapes |= {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(self.features)}
        for layer in range(self.layers):
            name = f"layers.{layer}." if layer else self.first
            shapes |= {
                name + key + ".weight": shape for key, shape in layer_shapes(1 if layer else 2, self.qk_norm).items()
            }
        known = VOCAB if self.known is None else len(self.known)
        sizes = {"embed_tokens": VOCAB, "lm_head": known}
        return shapes | {f"{name}.weight": (sizes[name], HIDDEN) for name in self.own}

    def write(self, folder: Path, seed: int = 3) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", self.config)
        generator, tensors = torch.Generator().manual_seed(seed), dict(self.added)
        for name, shape in self.shapes().items():
            noise = torch.randn(shape, generator=generator)
            # Without norms in front of it, a layer amplifies what it reads.
            gain = 0.3 if "embed_tokens" in name else (0.7 if self.is_first else 1.5) * shape[-1] ** -0.5
            is_norm = len(shape) == 1
            tensors[name] = 1 + 0.2 * noise if is_norm else gain * noise
        if self.mask_shape:
            tensors["mask_hidden"] = torch.randn(self.mask_shape, generator=generator)
        if self.raw_logits and not self.is_first:
            tensors["norm.weight"].fill_(1)
        target = {"embed_tokens": TARGET.model.model.embed_tokens.weight, "lm_head": head_of_target()}
        tensors |= {f"{name}.weight": target[name].clone() for name in self.copies}
        if self.known is not None:
            tensors["d2t"] = self.known - torch.arange(len(self.known))
            tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).scatter(0, self.known, True)
        save_file({self.prefix + name: tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
        return folder


class OriginalHead:
    """The head of a folder after a text: logits of each draft given those before it."""

    def __init__(self, head: Head, folder: Path) -> None:
        self.shape = head
        stored = load_file(folder / "model.safetensors")
        self.w = {name.removeprefix(head.prefix): tensor.double() for name, tensor in stored.items()}
        self.embedding = self.w.get("embed_tokens.weight", TARGET.model.model.embed_tokens.weight.double())
        self.head = self.w.get("lm_head.weight", head_of_target().double())

    def fuse(self, features: Tensor) -> Tensor:
        """`features [T, n * hidden]` to [T, hidden]."""
        if self.shape.is_first:
            return features
        if self.shape.feature_norm == "joint":
            features = rms(features, self.w["input_norm.weight"])
        if self.shape.feature_norm == "each":
            parts = features.chunk(self.shape.features, -1)
            features = torch.cat([rms(part, self.w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
        return features @ self.w["fc.weight"].T

    def layers(self, embedded: Tensor, features: Tensor, at: Tensor, seen: Tensor) -> Tensor:
        """The stream after all layers, of rows at positions `at`; row i sees row j where `seen[i, j]`."""
        w = self.layer(self.shape.first)
        if self.shape.is_first:
            x = torch.cat([embedded, features], -1) @ self.w["fc.weight"].T + self.w["fc.bias"]
            x = x + self_attention(w, x, at, seen)
            return x + swiglu(w, rms(x, w["post_attention_layernorm.weight"]))
        normed = rms(features, w["hidden_norm.weight"])
        both = torch.cat([rms(embedded, w["input_layernorm.weight"]), normed], -1)
        x = (normed if self.shape.normed_residual else features) + self_attention(w, both, at, seen)
        x = x + swiglu(w, rms(x, w["post_attention_layernorm.weight"]))
        for index in range(1, self.shape.layers):
            w = self.layer(f"layers.{index}.")
            x = x + self_attention(w, rms(x, w["input_layernorm.weight"]), at, seen)
            x = x + swiglu(w, rms(x, w["post_attention_layernorm.weight"]))
        return x

    def layer(self, prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): w for name, w in self.w.items() if name.startswith(prefix)}

    def logits(self, text: list[int], drafts: list[int]) -> Tensor:
        """[D, V]: logits of the first D drafts after `text`, each after the `drafts` before it; -inf for ids that the
        head does not know."""
        known = len(text) - 1
        states = hidden_states(*text)
        read = self.fuse(torch.cat([states[i][:known] for i in self.shape.hidden_states], -1))
        rows = (
            self.in_one_pass(text, read, len(drafts)) if self.shape.in_one_pass else self.chain_rows(text, read, drafts)
        )
        logits = (rows if self.shape.raw_logits else rms(rows, self.w["norm.weight"])) @ self.head.T
        if self.shape.known is None:
            return logits
        full = logits.new_full((len(logits), VOCAB), float("-inf"))
        return full.scatter(1, self.shape.known.expand(len(logits), -1), logits)

    def chain_rows(self, text: list[int], features: Tensor, drafts: list[int]) -> Tensor:
        """Streams [D, hidden] of a chain: each row reads the one before it in the place of a feature."""
        tokens, rows = text[1:], []
        for step in range(len(drafts)):
            at = torch.arange(len(tokens))
            stream = self.layers(self.embedding[tokens], features, at, at[:, None] >= at)[-1:]
            rows.append(stream)
            fed = rms(stream, self.w["norm.weight"]) if self.shape.normed_feedback else stream
            tokens, features = [*tokens, drafts[step]], torch.cat([features, fed])
        return torch.cat(rows)

    def in_one_pass(self, text: list[int], features: Tensor, depth: int) -> Tensor:
        """Streams [D, hidden]: rows of depth 0 at every position, then mask rows of the last position's rollout."""
        count = len(text) - 1
        mask = self.fuse(self.w["mask_hidden"].reshape(1, -1)).expand(depth - 1, -1)
        embedded = self.embedding[text[1:] + [MASK] * (depth - 1)]
        anchor = torch.tensor([*range(count), *[count - 1] * (depth - 1)])
        depths = torch.tensor([0] * count + list(range(1, depth)))
        before = (depths == 0) & (anchor <= anchor[:, None])
        seen = before | ((anchor == anchor[:, None]) & (depths <= depths[:, None]))
        stream = self.layers(embedded, torch.cat([features, mask]), anchor + depths, seen)
        return stream[count - 1 :]


def eagle(own: tuple[str, ...]) -> Head:
    """github.com/SafeAILab/EAGLE; `bias` is absent from most configs and then true."""
    config = {key: value for key, value in LLAMA.items() if key != "layer_types"} | {"num_hidden_layers": 1}
    return Head(config, (CONFIG.num_layers,), own=own, raw_logits=True, is_first=True)


def deepspec(own: tuple[str, ...] = (), **keys: Any) -> Head:
    """github.com/deepseek-ai/DeepSpec, deepspec/modeling/eagle3."""
    config = {
        **DECODER, "architectures": ["Qwen3Eagle3Model"], "draft_num_hidden_layers": 1,
        "layer_types": ["full_attention"], "num_hidden_layers": 1, "num_target_layers": CONFIG.num_layers,
        "step_loss_decay": 0.8, "target_layer_ids": [0, 1, 2, -1, 1], "ttt_length": 7, **keys,
    }  # fmt: skip
    copies = tuple(name for name in ("embed_tokens", "lm_head") if name not in own)
    return Head(config, (1, 2, 3, 0, 2), qk_norm=True, own=own, copies=copies)


def speculators(
    kind: str = "eagle3",
    decoder: dict[str, Any] = LLAMA,
    layers_run: tuple[int, ...] = (0, 2, 4),
    layers: int = 1,
    norm_output: bool = False,
    **changes: Any,
) -> Head:
    """github.com/vllm-project/speculators, src/speculators/models/eagle3 and peagle."""
    shape = {key: value for key, value in decoder.items() if key not in ("tie_word_embeddings",)}
    known, feature_norm = changes.setdefault("known", KNOWN), changes.get("feature_norm")
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": VOCAB if known is None else len(known),
        "eagle_aux_hidden_state_layer_ids": list(layers_run),
        "embed_requires_grad": kind == "peagle",
        "fc_norm": feature_norm == "each",
        "norm_before_fc": feature_norm == "joint",
        "norm_before_residual": changes.get("normed_residual", False),
        "norm_output": norm_output,
        "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}]},
        "speculators_model_type": kind,
        "target_hidden_size": None,
        "transformer_layer_config": {**shape, "layer_types": ["full_attention"] * layers, "num_hidden_layers": layers},
    }
    if kind == "peagle":
        config["mask_token_id"] = MASK
        changes["mask_shape"] = (1, 1, len(layers_run) * HIDDEN)
    read = tuple(-1 if i == CONFIG.num_layers else i for i in layers_run)
    return Head(
        config, read, layers=layers, qk_norm=decoder["model_type"] == "qwen3", own=("embed_tokens", "lm_head"),
        normed_feedback=norm_output and kind == "eagle3", **changes,
    )  # fmt: skip


def specforge_peagle(**keys: Any) -> Head:
    """github.com/sgl-project/SpecForge, specforge/modeling/draft/peagle.py. The mask token is in no key."""
    config = {
        **LLAMA, "architectures": ["PEagleDraftModel"], "draft_vocab_size": len(KNOWN),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3], "use_aux_hidden_state": True},
        "norm_before_residual": False, "num_hidden_layers": 3, **keys,
    }  # fmt: skip
    config.pop("layer_types")
    return Head(
        config, (1, 2, -1), layers=3, known=KNOWN, own=("embed_tokens", "lm_head"), mask_shape=(1, 1, 3 * HIDDEN)
    )


def renamed_peagle(key: str, prefix: str = "", **added: Any) -> Head:
    """Names of EAGLE-3: AWS's checkpoints, and exports of NVIDIA Automodel, whose mask has two dimensions."""
    config = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 2, key: MASK, **added}
    config |= {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
    config.pop("layer_types")
    return Head(
        config, (1, 2, -1), first="midlayer.", layers=2, own=("embed_tokens", "lm_head"), mask_shape=(1, 3 * HIDDEN),
        prefix=prefix,
    )  # fmt: skip


def specforge(norm_output: bool, raw_logits: bool = False, **keys: Any) -> Head:
    """SpecForge's EAGLE-3 with an explicit `norm_output`."""
    config = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, **keys}
    config |= {"eagle_aux_hidden_state_layer_ids": [0, 1, 3], "norm_output": norm_output}
    config.pop("layer_types")
    return Head(
        config, (1, 2, -1), first="midlayer.", own=("lm_head",), normed_feedback=norm_output, raw_logits=raw_logits
    )


CHAINS = {
    "deepspec": deepspec(),
    "deepspec own": deepspec(own=("embed_tokens", "lm_head")),
    "speculators": speculators(),
    "speculators default": speculators(feature_norm="joint", normed_residual=True, norm_output=True),
    "speculators qwen3 of two layers": speculators(
        decoder=DECODER, layers=2, layers_run=(1, 3), normed_residual=True, known=None
    ),
    "speculators each": speculators(feature_norm="each", norm_output=True, layers_run=(2,)),
    "specforge new true": specforge(True, feedback="normed"),
    "specforge new false": specforge(False),
    "specforge old false": specforge(False, raw_logits=True),
}
ONE_PASS = {
    "speculators peagle": speculators("peagle"),
    "speculators peagle normed": speculators(
        "peagle", decoder=DECODER, layers=2, feature_norm="joint", normed_residual=True, norm_output=True
    ),
    "specforge peagle": specforge_peagle(),
    "aws peagle": renamed_peagle("ptd_token_id"),
    "nvidia peagle": renamed_peagle("pard_token", prefix="model.", mask_token_id=MASK),
}
HEADS_BY_NAME = CHAINS | ONE_PASS | {"eagle": eagle(()), "eagle own": eagle(("embed_tokens",))}
