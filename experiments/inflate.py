"""Writes a model family that computes a small family's function at a large family's cost.

    python -m experiments.inflate shape=qwen3_8b out=outputs/qwen3_8b_shape

The channels, heads, neurons, layers and tokens of the small family become the first ones of the large family. The
others hold random weights, which are read and multiplied like any, and whose results are multiplied by zero on their
way out. So texts and accepted drafts are the small family's, in exact arithmetic, and times are the large one's. Four
folders in the Hugging Face layout are written: `target`, `dflash`, `eagle3` and `draft`, a standalone draft model.

What keeps the function, with d of D channels and h of H elements of a head in use:

- A norm over D channels divides by a root mean square that is sqrt(d / D) of the small one's, so its weights are
  multiplied by sqrt(d / D).
- Channel d of the residual stream is a constant c that no layer changes. Norms see it where the small family adds
  eps: (d m + c^2) / D + eps' = (d / D) (m + eps) for the mean square m.
- Unused tokens have a large negative weight on the constant channel alone, so their logits never win.
- Rotary pair i of h / 2 turns as pair i H / h of H / 2. Scores are divided by sqrt(H) instead of sqrt(h), which the
  query's norm or projection makes up for. The eps of a norm over a head is a different one; its part of the mean
  square is below the rounding of float32 for trained models.
- Query heads are placed so that each reads the key head that it read.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig
from safetensors.torch import load_file, save_file
from torch import Tensor

from experiments.app import cli
from experiments.app.errors import user_errors
from experiments.app.schema import REPO_ROOT
from experiments.training.model_folder import write_json
from specdec_kernels.checks import expect_choice

Tensors = Iterator[tuple[str, Tensor]]

COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
SHARD_BYTES = 4 << 30
RANDOM_STD = 0.02
UNUSED_WEIGHT = 512.0  # of the final norm and, negative, of the LM head, on the constant channel
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Shape:
    """What the cost of a decoder depends on."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """The shape in a `config.json`."""
        return cls(
            config["hidden_size"],
            config["intermediate_size"],
            config["num_hidden_layers"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
            config["vocab_size"],
        )


@dataclass(frozen=True)
class Family:
    """Shapes of a target and its drafters. dflash_features: target layers that the DFlash drafter reads."""

    target: Shape
    draft: Shape
    dflash_layers: int
    dflash_features: int
    eagle3_vocab_size: int
    max_position_embeddings: int = 40960


SHAPES = {
    # Qwen3-8B with Qwen3-0.6B, z-lab's DFlash drafter and an EAGLE-3 head of 32,000 tokens.
    "qwen3_8b": Family(
        Shape(4096, 12288, 36, 32, 8, 128, 151936), Shape(1024, 3072, 28, 16, 8, 128, 151936), 5, 5, 32000
    ),
    # Llama-3.1-8B with Llama-3.2-1B and the same kinds of drafters.
    "llama31_8b": Family(
        Shape(4096, 14336, 32, 32, 8, 128, 128256), Shape(2048, 8192, 16, 32, 8, 64, 128256), 5, 5, 32000
    ),
    # For tests: every dimension is larger than the tiny family's, none by the same factor.
    "test": Family(Shape(320, 832, 8, 9, 3, 128, 2304), Shape(192, 320, 5, 6, 2, 128, 2304), 4, 5, 1664, 1024),
}


@dataclass
class InflateConfig:
    """Schema of `configs/inflate.yaml`. family: folder with `target`, `dflash`, `eagle3` and `draft`. device: auto is
    a GPU where there is one. Random weights come from `seed`."""

    shape: str = "qwen3_8b"
    out: str = "???"
    family: str = str(REPO_ROOT / "assets/tiny")
    dtype: str = "bfloat16"
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        expect_choice("shape", self.shape, tuple(SHAPES))
        expect_choice("dtype", self.dtype, tuple(DTYPES))
        expect_choice("device", self.device, ("auto", "cpu", "cuda"))


ConfigStore.instance().store(name="inflate_schema", node=InflateConfig)


@dataclass
class Inflater:
    """Places the weights of a decoder of shape `small` in tensors of shape `large`."""

    small: Shape
    large: Shape
    eps: float
    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator = field(repr=False)

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_kv_heads", "head_dim", "vocab_size"):
            small, large = getattr(self.small, name), getattr(self.large, name)
            if small > large or (name == "hidden_size" and small == large):
                raise ValueError(f"{name}: expected more than the small family's {small}, got {large}")
        if self.large.head_dim % self.small.head_dim or self._group(self.small) > self._group(self.large):
            raise ValueError(f"expected heads that hold those of {self.small}, got {self.large}")
        exact = math.sqrt(self.eps * self.small.hidden_size / 2)
        self.constant = torch.tensor(exact).bfloat16().item()

    @staticmethod
    def _group(shape: Shape) -> int:
        return shape.num_heads // shape.num_kv_heads

    @property
    def large_eps(self) -> float:
        """The part of eps that the constant channel leaves."""
        return (self.eps * self.small.hidden_size - self.constant**2) / self.large.hidden_size

    def random(self, *shape: int) -> Tensor:
        values = torch.randn(*shape, generator=self.generator, device=self.device, dtype=torch.float32)
        return values.mul_(RANDOM_STD).to(self.dtype)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, device=self.device, dtype=self.dtype)

    def ones(self, size: int) -> Tensor:
        return torch.ones(size, device=self.device, dtype=self.dtype)

    def given(self, weight: Tensor) -> Tensor:
        """A small tensor, ready to be scaled and placed."""
        return weight.to(self.device, torch.float32)

    def norm(self, weight: Tensor, is_last: bool = False) -> Tensor:
        """[d] weights of a norm over the residual stream to [D]; the last norm of a model raises the constant."""
        out = self.ones(self.large.hidden_size)
        d = self.small.hidden_size
        out[:d] = self.given(weight) * math.sqrt(d / self.large.hidden_size)
        out[d] = UNUSED_WEIGHT if is_last else 1.0
        return out

    def reading(self, weight: Tensor, streams: int = 1) -> Tensor:
        """[rows, streams * d] of a matrix that reads the residual stream, or several side by side, to
        [rows, streams * D]: other channels are multiplied by zero."""
        parts = rearrange(self.given(weight), "rows (streams d) -> rows streams d", streams=streams)
        padding = self.large.hidden_size - self.small.hidden_size
        return rearrange(torch.nn.functional.pad(parts, (0, padding)), "rows streams d -> rows (streams d)")

    def head_elements(self) -> Tensor:
        """Where the elements of a small head lie in a large one: rotary pairs of equal angles, in both halves."""
        factor = self.large.head_dim // self.small.head_dim
        pairs = torch.arange(self.small.head_dim // 2, device=self.device) * factor
        return torch.cat([pairs, pairs + self.large.head_dim // 2])

    def query_heads(self) -> list[int]:
        """The large query head of each small one: of the same key head."""
        small, large = self._group(self.small), self._group(self.large)
        return [head // small * large + head % small for head in range(self.small.num_heads)]

    def head_rows(self, weight: Tensor, heads: int, places: list[int], streams: int, scale: float = 1.0) -> Tensor:
        """[s * h, in] of a query, key or value projection to [heads * H, in]; heads of no place are random."""
        out = self.random(heads, self.large.head_dim, streams * self.large.hidden_size)
        rows = rearrange(self.reading(weight, streams) * scale, "(s h) d -> s h d", h=self.small.head_dim)
        for row, place in zip(rows, places, strict=True):
            out[place] = 0
            out[place, self.head_elements()] = row.to(self.dtype)
        return rearrange(out, "heads h d -> (heads h) d")

    def attention(self, tensors: dict[str, Tensor], prefix: str, streams: int) -> Tensors:
        """Queries are stretched by sqrt(H / h) in all, in their norm where there is one."""
        small, large, stretch = self.small, self.large, math.sqrt(self.large.head_dim / self.small.head_dim)
        has_norm = f"{prefix}q_norm.weight" in tensors
        queries, keys = self.query_heads(), list(range(small.num_kv_heads))
        for name, heads, places in (
            ("q", large.num_heads, queries),
            ("k", large.num_kv_heads, keys),
            ("v", large.num_kv_heads, keys),
        ):
            scale = stretch if name == "q" and not has_norm else 1.0
            weight = tensors[f"{prefix}{name}_proj.weight"]
            yield f"{name}_proj.weight", self.head_rows(weight, heads, places, streams, scale)
        out = self.zeros(large.hidden_size, large.num_heads, large.head_dim)
        columns = rearrange(self.given(tensors[f"{prefix}o_proj.weight"]), "d (s h) -> s d h", h=small.head_dim)
        for column, place in zip(columns, queries, strict=True):
            out[: small.hidden_size, place, self.head_elements()] = column.to(self.dtype)
        yield "o_proj.weight", rearrange(out, "d heads h -> d (heads h)")
        if has_norm:
            for name, scale in (("q_norm", 1.0), ("k_norm", 1 / stretch)):  # a norm over H elements: 1 / stretch
                weight = self.ones(large.head_dim)
                weight[self.head_elements()] = (self.given(tensors[f"{prefix}{name}.weight"]) * scale).to(self.dtype)
                yield f"{name}.weight", weight

    def mlp(self, tensors: dict[str, Tensor], prefix: str) -> Tensors:
        d, f, large = self.small.hidden_size, self.small.intermediate_size, self.large
        for name in ("gate_proj", "up_proj"):
            weight = self.random(large.intermediate_size, large.hidden_size)
            weight[:f] = self.reading(tensors[f"{prefix}{name}.weight"]).to(self.dtype)
            yield f"{name}.weight", weight
        down = self.zeros(large.hidden_size, large.intermediate_size)
        down[:d, :f] = self.given(tensors[f"{prefix}down_proj.weight"]).to(self.dtype)
        yield "down_proj.weight", down

    def layer(self, tensors: dict[str, Tensor], prefix: str, streams: int = 1) -> Tensors:
        """A layer of the small model; its attention reads `streams` normed streams side by side."""
        for name, weight in self.attention(tensors, f"{prefix}self_attn.", streams):
            yield f"{prefix}self_attn.{name}", weight
        for name, weight in self.mlp(tensors, f"{prefix}mlp."):
            yield f"{prefix}mlp.{name}", weight
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            if f"{prefix}{name}.weight" in tensors:
                yield f"{prefix}{name}.weight", self.norm(tensors[f"{prefix}{name}.weight"])

    def idle_layer(self, prefix: str) -> Tensors:
        """A layer behind those of the small model: random, and nothing of it reaches the stream."""
        large = self.large
        width, heads, keys = large.hidden_size, large.num_heads * large.head_dim, large.num_kv_heads * large.head_dim
        for name, rows in (("q_proj", heads), ("k_proj", keys), ("v_proj", keys)):
            yield f"{prefix}self_attn.{name}.weight", self.random(rows, width)
        yield f"{prefix}self_attn.o_proj.weight", self.zeros(width, heads)
        for name in ("q_norm", "k_norm"):
            yield f"{prefix}self_attn.{name}.weight", self.ones(large.head_dim)
        for name in ("gate_proj", "up_proj"):
            yield f"{prefix}mlp.{name}.weight", self.random(large.intermediate_size, width)
        yield f"{prefix}mlp.down_proj.weight", self.zeros(width, large.intermediate_size)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", self.ones(width)

    def layers(self, tensors: dict[str, Tensor], prefix: str) -> Tensors:
        for index in range(self.large.num_layers):
            name = f"{prefix}layers.{index}."
            yield from self.layer(tensors, name) if index < self.small.num_layers else self.idle_layer(name)

    def embedding(self, weight: Tensor) -> Tensor:
        """[v, d] to [V, D], with the constant channel."""
        out = self.random(self.large.vocab_size, self.large.hidden_size)
        out[: len(weight)] = self.reading(weight).to(self.dtype)
        out[:, self.small.hidden_size] = self.constant
        return out

    def lm_head(self, weight: Tensor, tokens: int) -> Tensor:
        """[v, d] to [tokens, D]: rows from v on have large negative logits."""
        d = self.small.hidden_size
        out = self.random(tokens, self.large.hidden_size)
        out[: len(weight)] = self.reading(weight).to(self.dtype)
        out[len(weight) :, :d] = 0
        out[len(weight) :, d] = -UNUSED_WEIGHT
        return out

    def fusion(self, weight: Tensor, streams: int) -> Tensor:
        """[d, n * d] of the matrix that fuses n captured layers to [D, streams * D]; the constant passes."""
        d, width = self.small.hidden_size, self.large.hidden_size
        out = self.random(width, streams * width)
        out[d:] = 0
        used = weight.shape[1] // d
        out[:d] = 0
        out[:d, : used * width] = self.reading(weight, used).to(self.dtype)
        out[d, d] = 1.0
        return out


def read_folder(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and `config.json` of a model in one file. Raises ValueError where one is missing."""
    for name in ("model.safetensors", "config.json"):
        if not (folder / name).is_file():
            raise ValueError(f"family: expected a folder with {name}, there is none in {folder}")
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def large_config(config: dict[str, Any], inflater: Inflater, family: Family, **changes: Any) -> dict[str, Any]:
    """The small model's `config.json` with the large shape."""
    large = inflater.large
    return config | {
        "hidden_size": large.hidden_size,
        "intermediate_size": large.intermediate_size,
        "num_hidden_layers": large.num_layers,
        "num_attention_heads": large.num_heads,
        "num_key_value_heads": large.num_kv_heads,
        "head_dim": large.head_dim,
        "vocab_size": large.vocab_size,
        "rms_norm_eps": inflater.large_eps,
        "max_position_embeddings": family.max_position_embeddings,
        "tie_word_embeddings": False,
        "dtype": str(inflater.dtype)[6:],
        **changes,
    }


def inflate_decoder(tensors: dict[str, Tensor], inflater: Inflater) -> Tensors:
    """A language model: the target, or the standalone draft model."""
    embedding = tensors["model.embed_tokens.weight"]
    yield "model.embed_tokens.weight", inflater.embedding(embedding)
    yield from inflater.layers(tensors, "model.")
    yield "model.norm.weight", inflater.norm(tensors["model.norm.weight"], is_last=True)
    yield "lm_head.weight", inflater.lm_head(tensors.get("lm_head.weight", embedding), inflater.large.vocab_size)


def inflate_dflash(tensors: dict[str, Tensor], inflater: Inflater, features: int) -> Tensors:
    """A DFlash drafter that reads `features` layers of the target."""
    yield "fc.weight", inflater.fusion(tensors["fc.weight"], features)
    yield "hidden_norm.weight", inflater.norm(tensors["hidden_norm.weight"])
    yield from inflater.layers(tensors, "")
    yield "norm.weight", inflater.norm(tensors["norm.weight"], is_last=True)


def inflate_eagle3(tensors: dict[str, Tensor], inflater: Inflater, tokens: int) -> Tensors:
    """An EAGLE-3 head of `tokens` draft tokens; those beyond the small head's are targets that are never drafted."""
    used = len(tensors["d2t"])
    known = torch.zeros(inflater.large.vocab_size, dtype=torch.bool)
    known[: len(tensors["t2d"])] = tensors["t2d"]
    unused = len(tensors["t2d"]) + torch.arange(tokens - used)
    known[unused] = True
    yield "fc.weight", inflater.fusion(tensors["fc.weight"], 3)
    yield from inflater.layer(tensors, "midlayer.", streams=2)
    yield "norm.weight", inflater.norm(tensors["norm.weight"], is_last=True)
    yield "lm_head.weight", inflater.lm_head(tensors["lm_head.weight"], tokens)
    yield "d2t", torch.cat([tensors["d2t"], unused - torch.arange(used, tokens)])
    yield "t2d", known


def write_folder(folder: Path, tensors: Tensors, config: dict[str, Any], source: Path) -> int:
    """Write shards as the tensors come, the index, `config.json`, and the tokenizer of `source`; returns bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    shard: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    total = held = 0

    def flush() -> None:
        nonlocal held
        name = f"model-{len(set(places.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, name))
        shard.clear()
        held = 0

    for name, tensor in tensors:
        shard[name] = tensor.cpu().contiguous()
        size = tensor.numel() * tensor.element_size()
        total, held = total + size, held + size
        if held > SHARD_BYTES:
            flush()
    if shard:
        flush()
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})
    write_json(folder / "config.json", config)
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    return total


def inflate(config: InflateConfig) -> dict[str, int]:
    """Write the four folders; returns the bytes of each.

    Raises:
        ValueError: the small family is not complete, or does not fit into the shape.
    """
    family, source, out = SHAPES[config.shape], Path(config.family), Path(config.out)
    device = torch.device("cuda" if config.device == "auto" and torch.cuda.is_available() else
                          "cpu" if config.device == "auto" else config.device)  # fmt: skip
    generator = torch.Generator(device).manual_seed(config.seed)

    def inflater(settings: dict[str, Any], large: Shape) -> Inflater:
        eps = settings["rms_norm_eps"]
        return Inflater(Shape.of(settings), large, eps, DTYPES[config.dtype], device, generator)

    written = {}
    for name, large in (("target", family.target), ("draft", family.draft)):
        tensors, settings = read_folder(source / name)
        model = inflater(settings, large)
        folder_config = large_config(settings, model, family)
        written[name] = write_folder(out / name, inflate_decoder(tensors, model), folder_config, source / name)

    tensors, settings = read_folder(source / "dflash")
    model = inflater(settings, replace(family.target, num_layers=family.dflash_layers))
    ids = settings["dflash_config"]["target_layer_ids"]
    more = family.dflash_features - len(ids)
    ids = [*ids, *range(family.target.num_layers - 2 - more, family.target.num_layers - 2)]  # idle layers
    folder_config = large_config(
        settings,
        model,
        family,
        num_target_layers=family.target.num_layers,
        layer_types=["full_attention"] * family.dflash_layers,
        dflash_config=settings["dflash_config"] | {"target_layer_ids": ids},
    )
    written["dflash"] = write_folder(
        out / "dflash", inflate_dflash(tensors, model, len(ids)), folder_config, source / "dflash"
    )

    tensors, settings = read_folder(source / "eagle3")
    model = inflater(settings, replace(family.target, num_layers=1))
    folder_config = large_config(
        settings,
        model,
        family,
        draft_vocab_size=family.eagle3_vocab_size,
        target_hidden_size=family.target.hidden_size,
    )
    written["eagle3"] = write_folder(
        out / "eagle3", inflate_eagle3(tensors, model, family.eagle3_vocab_size), folder_config, source / "eagle3"
    )
    return written


def run(config: InflateConfig, composed: DictConfig) -> None:
    """Write the folders and print what was written."""
    with user_errors(ValueError):
        written = inflate(config)
    for name, size in written.items():
        print(f"{Path(config.out) / name}: {size / 1e9:.2f} GB")


def main() -> None:
    """Command line entry."""
    cli.main(run, "inflate")


if __name__ == "__main__":
    main()
