"""Writes a model family that computes a small family's function at a large family's cost.

    python -m experiments.studies.shape_scaled shape=qwen3_8b out=outputs/qwen3_8b_shape

The channels, heads, neurons, layers and tokens of the small family become the first ones of the large family. The
others have random weights, which are read and multiplied like all weights; their results are multiplied by zero at the
end. So outputs and accepted drafts equal the small family's, in exact arithmetic, and times are the large one's.
Four folders in the Hugging Face layout are written: `target`, `dflash`, `eagle3` and `draft`, a standalone draft model.

Rules that keep the function, with d of D channels and h of H elements of a head in use:

- A norm over D channels divides by a root mean square that is sqrt(d / D) of the small one's, so its weights are
  multiplied by sqrt(d / D).
- Channel d of the residual stream is a constant c that no layer changes. Norms see it where the small family adds
  eps: (d m + c^2) / D + eps' = (d / D) (m + eps) for the mean square m.
- Unused tokens have a large negative weight on the constant channel alone, so their logits never win.
- Rotary pair i of h / 2 turns as pair i H / h of H / 2. Scores are divided by sqrt(H) instead of sqrt(h), which the
  query's norm or projection makes up for. The eps of a norm over a head is a different one; its part of the mean
  square is below the rounding of float32 for trained models.
- Query heads are placed so that each reads the key head that it read.

A family with experts holds the small MLP in every expert, each in its own memory. The weights of a token's experts sum
to one, so any choice gives the small family's function, and the router is free to model traffic (`routing`):

- `tokens`: every token has a random code in channels behind the constant, which no layer changes; a layer's router
  multiplies it by a random matrix. Tokens choose independently, all experts alike.
- `popular`: the same with a random preference for each expert of a layer, from the constant channel. Its standard
  deviation is `skew` times that of a token's own logits.
- `stream`: the router multiplies the small family's residual stream, which depends on the text before a token, and in
  which neighbours resemble each other. A code is a token's own in every text.

A code has one mean square for all tokens, which comes out of eps as the constant's does. Folders hold one expert of a
layer (`same_experts` in `config.json`); loading copies it.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from einops import rearrange
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig
from safetensors.torch import load_file
from torch import Tensor

from algorithms.checked import Between, Checked
from experiments.app import cli
from experiments.app.errors import user_errors
from experiments.app.hardware import chosen_device
from experiments.app.schema import REPO_ROOT
from experiments.training.export import write_json

Tensors = Iterator[tuple[str, Tensor]]

COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
SHARD_SIZE = "4GB"
RANDOM_STD = 0.02
UNUSED_WEIGHT = 512.0  # of the final norm and, negative, of the LM head, on the constant channel
ROUTINGS = ("tokens", "popular", "stream")
CODE_CHANNELS = 32
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder, by the names of `config.json`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """The shape in a `config.json`."""
        return cls(*(config[field.name] for field in fields(cls)))


@dataclass(frozen=True)
class ExpertShape:
    """The MLPs of a target with experts."""

    num_experts: int
    topk: int
    width: int

    def keys(self) -> dict[str, Any]:
        """Of a Qwen3-MoE `config.json`."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.topk,
            "moe_intermediate_size": self.width,
            "norm_topk_prob": True,
            "same_experts": True,
        }


@dataclass(frozen=True)
class Family:
    """Shapes of a target and its drafters. dflash_features: target layers that the DFlash drafter reads."""

    target: Shape
    draft: Shape
    dflash_layers: int = 5
    dflash_features: int = 5
    eagle3_vocab_size: int = 32000
    max_position_embeddings: int = 40960
    experts: ExpertShape | None = None


QWEN3_06B = Shape(1024, 3072, 28, 16, 8, 128, 151936)
SHAPES = {
    # Qwen3-8B with Qwen3-0.6B, z-lab's DFlash drafter and an EAGLE-3 head of 32,000 tokens.
    "qwen3_8b": Family(Shape(4096, 12288, 36, 32, 8, 128, 151936), QWEN3_06B),
    # Llama-3.1-8B with Llama-3.2-1B and the same kinds of drafters.
    "llama31_8b": Family(Shape(4096, 14336, 32, 32, 8, 128, 128256), Shape(2048, 8192, 16, 32, 8, 64, 128256)),
    # Qwen3-30B-A3B with Qwen3-0.6B and the same kinds of drafters, whose MLPs are dense.
    "qwen3_30b_a3b": Family(Shape(2048, 6144, 48, 32, 4, 128, 151936), QWEN3_06B, experts=ExpertShape(128, 8, 768)),
}


@dataclass
class ShapeScaledConfig(Checked):
    """Schema of `configs/shape_scaled.yaml`. family: folder with `target`, `dflash`, `eagle3` and `draft`. device: auto
    is a GPU where there is one. Random weights come from `seed`. routing: how tokens choose experts, of a shape that
    has any. skew: of `popular`, how far preferences differ. max_position_embeddings: the longest
    context; None is the shape's own."""

    shape: Annotated[str, tuple(SHAPES)] = "qwen3_8b"
    routing: Annotated[str, ROUTINGS] = "tokens"
    skew: Annotated[float, Between(0.0)] = 1.0
    out: str = "???"
    family: str = str(REPO_ROOT / "assets/tiny")
    dtype: Annotated[str, tuple(DTYPES)] = "bfloat16"
    device: Annotated[str, ("auto", "cpu", "cuda")] = "auto"
    seed: int = 0
    max_position_embeddings: Annotated[int | None, Between(1)] = None


ConfigStore.instance().store(name="shape_scaled_schema", node=ShapeScaledConfig)


@dataclass
class ShapeScaler:
    """Places the weights of a decoder of shape `small` in tensors of shape `large`."""

    small: Shape
    large: Shape
    eps: float
    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator = field(repr=False)
    has_codes: bool = False  # whether tokens have codes, see the module

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(Shape) if each.name != "num_attention_heads"):
            small, large = getattr(self.small, name), getattr(self.large, name)
            if small > large or (name == "hidden_size" and small + self.num_codes >= large):
                raise ValueError(f"{name}: expected more than the small family's {small}, got {large}")
        if self.large.head_dim % self.small.head_dim or self._group(self.small) > self._group(self.large):
            raise ValueError(f"expected heads that hold those of {self.small}, got {self.large}")
        exact = math.sqrt(self.eps * self.small.hidden_size / 2)
        self.constant = torch.tensor(exact).bfloat16().item()
        # A quarter of eps for all code channels, as half of it for the constant.
        code = exact / math.sqrt(2 * CODE_CHANNELS)
        self.code = torch.tensor(code).bfloat16().item()

    @property
    def num_codes(self) -> int:
        return CODE_CHANNELS if self.has_codes else 0

    @property
    def code_channels(self) -> slice:
        first = self.small.hidden_size + 1
        return slice(first, first + self.num_codes)

    @staticmethod
    def _group(shape: Shape) -> int:
        return shape.num_attention_heads // shape.num_key_value_heads

    @property
    def large_eps(self) -> float:
        """The part of eps that the constant channel and the codes leave."""
        used = self.constant**2 + self.num_codes * self.code**2
        return (self.eps * self.small.hidden_size - used) / self.large.hidden_size

    def random(self, *shape: int) -> Tensor:
        values = torch.randn(*shape, generator=self.generator, device=self.device, dtype=torch.float32)
        return values.mul_(RANDOM_STD).to(self.dtype)

    def full(self, value: float, *shape: int) -> Tensor:
        return torch.full(shape, value, device=self.device, dtype=self.dtype)

    def norm(self, weight: Tensor, is_last: bool = False) -> Tensor:
        """[d] weights of a norm over the residual stream to [D]; the last norm of a model raises the constant."""
        out = self.full(1.0, self.large.hidden_size)
        d = self.small.hidden_size
        out[:d] = weight * math.sqrt(d / self.large.hidden_size)
        out[d] = UNUSED_WEIGHT if is_last else 1.0
        return out

    def reading(self, weight: Tensor, streams: int = 1) -> Tensor:
        """[rows, streams * d] of a matrix that reads the residual stream, or several side by side, to
        [rows, streams * D]: other channels are multiplied by zero."""
        parts = rearrange(weight, "rows (streams d) -> rows streams d", streams=streams)
        padding = self.large.hidden_size - self.small.hidden_size
        padded = torch.nn.functional.pad(parts, (0, padding))
        return rearrange(padded, "rows streams d -> rows (streams d)").to(self.dtype)

    def head_elements(self) -> Tensor:
        """Places of the elements of a small head in a large one: rotary pairs of equal angles, in both halves."""
        factor = self.large.head_dim // self.small.head_dim
        pairs = torch.arange(self.small.head_dim // 2, device=self.device) * factor
        return torch.cat([pairs, pairs + self.large.head_dim // 2])

    def query_heads(self) -> list[int]:
        """The large query head of each small one: of the same key head."""
        small, large = self._group(self.small), self._group(self.large)
        return [head // small * large + head % small for head in range(self.small.num_attention_heads)]

    def layer(
        self, tensors: dict[str, Tensor], source: str, prefix: str, streams: int = 1, idle: bool = False
    ) -> Tensors:
        """The small model's layer with the prefix `source` as the large one's with `prefix`; its attention reads
        `streams` normed streams side by side. An idle layer is random, and without effect on the residual stream."""
        has_norm = f"{source}self_attn.q_norm.weight" in tensors
        for name, weight in tensors.items():
            if name.startswith(source):
                yield prefix + name.removeprefix(source), self.placed(name, weight, streams, has_norm, idle)

    def placed(self, name: str, weight: Tensor, streams: int, has_norm: bool, idle: bool) -> Tensor:
        """The weight `name` of a layer in its place. Queries are stretched by sqrt(H / h) in all: by the norms of
        queries and keys where the layer has them, else by the projection."""
        small, large, kind = self.small, self.large, name.removesuffix(".weight").rpartition(".")[2]
        d, f = small.hidden_size, small.intermediate_size
        elements, stretch = self.head_elements(), math.sqrt(large.head_dim / small.head_dim)
        queries = torch.tensor(self.query_heads(), device=self.device)
        if kind in ("q_proj", "k_proj", "v_proj"):
            places = queries if kind == "q_proj" else torch.arange(small.num_key_value_heads, device=self.device)
            heads = large.num_attention_heads if kind == "q_proj" else large.num_key_value_heads
            out = self.random(heads, large.head_dim, streams * large.hidden_size)
            if not idle:
                scale = stretch if kind == "q_proj" and not has_norm else 1.0
                out[places] = 0
                out[places[:, None], elements] = rearrange(
                    self.reading(weight * scale, streams), "(s h) d -> s h d", h=small.head_dim
                )
            return out.flatten(0, 1)
        if kind == "o_proj":
            out = self.full(0.0, large.hidden_size, large.num_attention_heads, large.head_dim)
            if not idle:
                columns = rearrange(weight.to(self.dtype), "d (s h) -> d s h", h=small.head_dim)
                out[:d, queries[:, None], elements] = columns
            return out.flatten(1)
        if kind in ("gate_proj", "up_proj"):
            out = self.random(large.intermediate_size, large.hidden_size)
            if not idle:
                out[:f] = self.reading(weight)
            return out
        if kind == "down_proj":
            out = self.full(0.0, large.hidden_size, large.intermediate_size)
            if not idle:
                out[:d, :f] = weight
            return out
        if kind in ("q_norm", "k_norm"):
            out = self.full(1.0, large.head_dim)
            if not idle:
                # The norm over H elements, h of them in use, has stretched the query already.
                out[elements] = (weight / (1.0 if kind == "q_norm" else stretch)).to(self.dtype)
            return out
        return self.full(1.0, large.hidden_size) if idle else self.norm(weight)

    def layers(self, tensors: dict[str, Tensor], prefix: str) -> Tensors:
        for index in range(self.large.num_hidden_layers):
            idle = index >= self.small.num_hidden_layers
            source = f"{prefix}layers.{0 if idle else index}."
            yield from self.layer(tensors, source, f"{prefix}layers.{index}.", idle=idle)

    def embedding(self, weight: Tensor) -> Tensor:
        """[v, d] to [V, D], with the constant channel."""
        out = self.random(self.large.vocab_size, self.large.hidden_size)
        out[: len(weight)] = self.reading(weight)
        out[:, self.small.hidden_size] = self.constant
        if self.has_codes:
            out[:, self.code_channels] = self.random(len(out), self.num_codes).sign() * self.code
        return out

    def router(self, experts: int, routing: str, skew: float = 1.0) -> Tensor:
        """[experts, D]: logits of a standard deviation of about one where the mean square of the stream is one."""
        d, root = self.small.hidden_size, math.sqrt(self.large.hidden_size / self.small.hidden_size)
        out = self.full(0.0, experts, self.large.hidden_size)
        # Rows of one length: longer ones would be chosen more often.
        if routing == "stream":
            out[:, :d] = torch.nn.functional.normalize(self.random(experts, d))
            return out
        rows = torch.nn.functional.normalize(self.random(experts, self.num_codes))
        out[:, self.code_channels] = rows / (root * self.code)
        if routing == "popular":
            out[:, d] = skew * self.random(experts) / (RANDOM_STD * root * self.constant)
        return out

    def lm_head(self, weight: Tensor, tokens: int) -> Tensor:
        """[v, d] to [tokens, D]: rows from v on have large negative logits."""
        d = self.small.hidden_size
        out = self.random(tokens, self.large.hidden_size)
        out[: len(weight)] = self.reading(weight)
        out[len(weight) :, :d] = 0
        out[len(weight) :, d] = -UNUSED_WEIGHT
        return out

    def fusion(self, weight: Tensor, streams: int) -> Tensor:
        """[d, n * d] of the matrix that fuses n target layers to [D, streams * D]; the constant passes."""
        d, width = self.small.hidden_size, self.large.hidden_size
        out, used = self.full(0.0, width, streams * width), weight.shape[1] // d
        out[:d, : used * width] = self.reading(weight, used)
        out[d, d] = 1.0
        return out


def scaled_experts_decoder(
    tensors: dict[str, Tensor], scaler: ShapeScaler, experts: ExpertShape, routing: str, skew: float
) -> Tensors:
    """A target whose MLPs are experts, of which the first of each layer is given."""
    narrow = replace(scaler, large=replace(scaler.large, intermediate_size=experts.width))
    for name, tensor in scaled_decoder(tensors, narrow):
        yield name.replace(".mlp.", ".mlp.experts.0."), tensor
    for layer in range(scaler.large.num_hidden_layers):
        yield f"model.layers.{layer}.mlp.gate.weight", scaler.router(experts.num_experts, routing, skew)


def read_folder(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and `config.json` of a model in one file. Raises ValueError where one is missing."""
    for name in ("model.safetensors", "config.json"):
        if not (folder / name).is_file():
            raise ValueError(f"family: expected a folder with {name}, there is none in {folder}")
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def scaled_decoder(tensors: dict[str, Tensor], scaler: ShapeScaler) -> Tensors:
    """A language model: the target, or the standalone draft model."""
    embedding = tensors["model.embed_tokens.weight"]
    yield "model.embed_tokens.weight", scaler.embedding(embedding)
    yield from scaler.layers(tensors, "model.")
    yield "model.norm.weight", scaler.norm(tensors["model.norm.weight"], is_last=True)
    yield "lm_head.weight", scaler.lm_head(tensors.get("lm_head.weight", embedding), scaler.large.vocab_size)


def scaled_dflash(tensors: dict[str, Tensor], scaler: ShapeScaler, features: int) -> Tensors:
    """A DFlash drafter that reads `features` layers of the target."""
    yield "fc.weight", scaler.fusion(tensors["fc.weight"], features)
    yield "hidden_norm.weight", scaler.norm(tensors["hidden_norm.weight"])
    yield from scaler.layers(tensors, "")
    yield "norm.weight", scaler.norm(tensors["norm.weight"], is_last=True)


def scaled_eagle3(tensors: dict[str, Tensor], scaler: ShapeScaler, tokens: int) -> Tensors:
    """An EAGLE-3 head of `tokens` draft tokens; those beyond the small head's are targets that are never drafted."""
    used = len(tensors["d2t"])
    known = torch.zeros(scaler.large.vocab_size, dtype=torch.bool)
    known[: len(tensors["t2d"])] = tensors["t2d"]
    unused = len(tensors["t2d"]) + torch.arange(tokens - used)
    known[unused] = True
    yield "fc.weight", scaler.fusion(tensors["fc.weight"], 3)
    yield from scaler.layer(tensors, "midlayer.", "midlayer.", streams=2)
    yield "norm.weight", scaler.norm(tensors["norm.weight"], is_last=True)
    yield "lm_head.weight", scaler.lm_head(tensors["lm_head.weight"], tokens)
    yield "d2t", torch.cat([tensors["d2t"], unused - torch.arange(used, tokens)])
    yield "t2d", known


def write_family(config: ShapeScaledConfig) -> dict[str, int]:
    """Write the four folders; returns the bytes of each.

    Raises:
        ValueError: the small family is not complete, or does not fit into the shape.
    """
    from huggingface_hub import save_torch_state_dict

    family, dtype = SHAPES[config.shape], DTYPES[config.dtype]
    device = torch.device(chosen_device(config.device, "device"))
    generator = torch.Generator(device).manual_seed(config.seed)
    written = {}

    def write(name: str, large: Shape, tensors_of: Callable[..., Tensors], **changes: Any) -> None:
        source, folder = Path(config.family) / name, Path(config.out) / name
        tensors, small = read_folder(source)
        has_codes = family.experts is not None and name != "draft"
        scaler = ShapeScaler(Shape.of(small), large, small["rms_norm_eps"], dtype, device, generator, has_codes)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {key: w.to(device, torch.float32) if w.is_floating_point() else w for key, w in tensors.items()}
        scaled = {key: tensor.cpu().contiguous() for key, tensor in tensors_of(tensors, scaler)}
        save_torch_state_dict(scaled, folder, max_shard_size=SHARD_SIZE)
        written[name] = sum(tensor.nbytes for tensor in scaled.values())
        shared = {"rms_norm_eps": scaler.large_eps, "tie_word_embeddings": False, "dtype": config.dtype}
        length = {"max_position_embeddings": config.max_position_embeddings or family.max_position_embeddings}
        write_json(folder / "config.json", small | asdict(large) | shared | length | changes)
        for companion in COMPANIONS:
            if (source / companion).is_file():
                shutil.copyfile(source / companion, folder / companion)

    if family.experts is None:
        write("target", family.target, scaled_decoder)
    else:
        with_experts = partial(scaled_experts_decoder, experts=family.experts, routing=config.routing, skew=config.skew)
        write("target", family.target, with_experts, **family.experts.keys())
    write("draft", family.draft, scaled_decoder)
    _, small = read_folder(Path(config.family) / "dflash")
    ids, layers = small["dflash_config"]["target_layer_ids"], family.target.num_hidden_layers
    more = family.dflash_features - len(ids)
    ids = [*ids, *range(layers - 2 - more, layers - 2)]  # idle layers
    write(
        "dflash",
        replace(family.target, num_hidden_layers=family.dflash_layers),
        partial(scaled_dflash, features=len(ids)),
        num_target_layers=layers,
        layer_types=["full_attention"] * family.dflash_layers,
        dflash_config=small["dflash_config"] | {"target_layer_ids": ids},
    )
    write(
        "eagle3",
        replace(family.target, num_hidden_layers=1),
        partial(scaled_eagle3, tokens=family.eagle3_vocab_size),
        draft_vocab_size=family.eagle3_vocab_size,
        target_hidden_size=family.target.hidden_size,
    )
    return written


def run(config: ShapeScaledConfig, composed: DictConfig) -> None:
    """Write the folders and print what was written."""
    with user_errors(ValueError):
        written = write_family(config)
    for name, size in written.items():
        print(f"{Path(config.out) / name}: {size / 1e9:.2f} GB")


def main() -> None:
    cli.main(run, "shape_scaled")


if __name__ == "__main__":
    main()
