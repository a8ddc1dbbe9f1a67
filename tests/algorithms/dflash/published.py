"""Block drafters of random weights in the layouts of their writers, and what they compute, spelled out from the
equations: one request, no cache, no batch, float64."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from algorithms.models.dense_mixer import DenseMixer
from tests.algorithms.drafters import DEEP_TARGET as TARGET
from tests.algorithms.tiny_folders import write_json
from tests.algorithms.toy import DEEP_CONFIG as CONFIG
from tests.algorithms.toy import VOCAB

HIDDEN, HEADS, KV_HEADS, SIZE, INNER, LAYERS = 32, 4, 2, 16, 48, 2
EPS, THETA, MASK = 1e-6, 10_000.0, VOCAB - 1
GROUP, CANDIDATES = 8, 7
DECODER: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": SIZE, "hidden_act": "silu",
    "hidden_size": HIDDEN, "intermediate_size": INNER, "layer_types": ["full_attention"] * LAYERS,
    "max_position_embeddings": 128, "model_type": "qwen3", "num_attention_heads": HEADS, "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS, "rms_norm_eps": EPS, "rope_theta": THETA, "sliding_window": None,
    "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": VOCAB,
}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A drafter's folder, and the conventions of its family."""

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    """Tensors besides those of the layers."""
    hidden_states: tuple[int, ...]
    """What the drafter reads, as indices of transformers' `hidden_states`; negative: the last layer's output before the
    final norm."""
    first_slot: int
    """The slot that drafts the token after the anchor."""
    block_size: int
    drafts: int
    causal: tuple[bool, ...] = (False,) * LAYERS
    windows: tuple[int | None, ...] = (None,) * LAYERS
    from_anchor: bool = False
    markov: str | None = None
    num_plain: int | None = None
    """First drafts that Domino's head leaves alone; None: there is no such head."""
    confidence: str | None = None
    """What a confidence head reads: hidden, or token besides."""
    selector: tuple[float, float, float | None] | None = None
    """Scale of the embeddings, of the logits, and their cap, of DFlash 2; None: another family."""
    prefix: str = ""
    """Of the tensors of heads."""
    copies: tuple[str, ...] = ()
    """Tensors that repeat the target's."""
    known: Tensor | None = None
    """Ids of the target that the drafter knows, rising."""
    added: dict[str, Tensor] = field(default_factory=dict)

    def write(self, folder: Path, seed: int = 3) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", self.config)
        generator, tensors = torch.Generator().manual_seed(seed), dict(self.added)
        layers = {f"layers.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in layer_shapes().items()}
        for name, shape in {**layers, **self.shapes}.items():
            noise = torch.randn(shape, generator=generator)
            gain = 0.3 if "embed_tokens" in name else 1.5 * shape[-1] ** -0.5
            tensors[name] = 1 + 0.2 * noise if name.endswith("norm.weight") else gain * noise
        own = {"embed_tokens.weight": TARGET.model.model.embed_tokens.weight, "lm_head.weight": head_of_target()}
        tensors |= {name: own[name].clone() for name in self.copies}
        if self.known is not None:
            tensors["d2t"] = self.known - torch.arange(len(self.known))
            tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).scatter(0, self.known, True)
        named = {self.prefix * ("_head." in name) + name: tensor for name, tensor in tensors.items()}
        save_file(named, folder / "model.safetensors")
        return folder


def head_of_target() -> Tensor:
    head = TARGET.model.lm_head
    assert isinstance(head, torch.nn.Linear)
    return head.weight


def layer_shapes(inputs: int = 1, qk_norm: bool = True) -> dict[str, tuple[int, ...]]:
    """Tensors of a decoder layer, whose attention may read an embedding and a feature."""
    layer = {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
    layer |= {"hidden_norm": (HIDDEN,)} if inputs == 2 else {}
    layer |= {f"self_attn.{name}_norm": (SIZE,) for name in "qk" if qk_norm}
    rows = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    layer |= {f"self_attn.{name}_proj": (count * SIZE, inputs * HIDDEN) for name, count in rows.items()}
    layer |= {"self_attn.o_proj": (HIDDEN, HEADS * SIZE), "mlp.down_proj": (HIDDEN, INNER)}
    return layer | {f"mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")}


def backbone(features: int = 2) -> dict[str, tuple[int, ...]]:
    return {"fc.weight": (HIDDEN, features * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / torch.sqrt((x**2).mean(-1, keepdim=True) + EPS)


def attended(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention of queries [T, heads, D] over keys and values [S, KV heads, D], of which `seen` [T, S]; [T, H D]."""
    mixed = []
    for head in range(q.shape[1]):
        group = head // (q.shape[1] // k.shape[1])
        scores = (q[:, head] @ k[:, group].T / q.shape[2] ** 0.5).masked_fill(~seen, float("-inf"))
        mixed.append(scores.softmax(-1) @ v[:, group])
    return torch.cat(mixed, -1)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of `x [T, heads, D]` as a product of complex numbers x[i] + i x[i + D/2]."""
    half = x.shape[-1] // 2
    angles = positions.double()[:, None, None] * THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def swiglu(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    gate, up = (x @ w[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return (gate * torch.sigmoid(gate) * up) @ w["mlp.down_proj.weight"].T


def self_attention(w: Mapping[str, Tensor], x: Tensor, at: Tensor, seen: Tensor) -> Tensor:
    """Of rows at positions `at`, of which row i sees row j where `seen[i, j]`; biases and norms of heads where a layer
    has them."""
    projected = {name: x @ w[f"self_attn.{name}_proj.weight"].T for name in "qkv"}
    q, k, v = (
        (each + w.get(f"self_attn.{name}_proj.bias", torch.zeros(()))).view(len(x), -1, SIZE)
        for name, each in projected.items()
    )
    if "self_attn.q_norm.weight" in w:
        q, k = rms(q, w["self_attn.q_norm.weight"]), rms(k, w["self_attn.k_norm.weight"])
    return attended(rotate(q, at), rotate(k, at), v, seen) @ w["self_attn.o_proj.weight"].T


class Original:
    """The drafter of a folder after a text: logits of each draft given those before it."""

    def __init__(self, published: Published, folder: Path) -> None:
        self.shape, self.known_hidden = published, dict[tuple[int, ...], Tensor]()
        stored = load_file(folder / "model.safetensors")
        self.w = {name.removeprefix(published.prefix): tensor.double() for name, tensor in stored.items()}
        self.embedding = self.w.get("embed_tokens.weight", TARGET.model.model.embed_tokens.weight.double())
        self.head = self.w.get("lm_head.weight", head_of_target().double())
        self.mask = MASK
        if "mask_embedding" in self.w:
            self.mask, self.embedding = VOCAB, torch.cat([self.embedding, self.w["mask_embedding"][None]])

    def hidden(self, text: list[int]) -> Tensor:
        """[block, hidden]: final hidden states of the block after `text`, whose last token is the anchor."""
        if tuple(text) in self.known_hidden:
            return self.known_hidden[tuple(text)]
        shape, anchor = self.shape, len(text) - 1
        context = torch.zeros(0, HIDDEN, dtype=torch.float64)
        if anchor:
            states = hidden_states(*text[:anchor])
            read = torch.cat([states[i] for i in shape.hidden_states], -1)
            context = rms(read @ self.w["fc.weight"].T, self.w["hidden_norm.weight"])
        x = self.embedding[[text[-1]] + [self.mask] * (shape.block_size - 1)] * (shape.selector or [1])[0]
        for i in range(LAYERS):
            layer = {n.removeprefix(f"layers.{i}."): w for n, w in self.w.items() if n.startswith(f"layers.{i}.")}
            x = self.layer(i, layer, x, context)
        return self.known_hidden.setdefault(tuple(text), rms(x, self.w["norm.weight"]))

    def layer(self, i: int, w: Mapping[str, Tensor], x: Tensor, context: Tensor) -> Tensor:
        def attend(rows: Tensor) -> Tensor:
            return self.attention(i, w, rows, context)

        x = x + self.convolved(w, "attention_conv", rms(x, w["input_layernorm.weight"]), attend)
        normed = rms(x, w["post_attention_layernorm.weight"])
        return x + self.convolved(w, "mlp_conv", normed, lambda rows: swiglu(w, rows))

    def convolved(self, w: Mapping[str, Tensor], name: str, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """The sublayer with DFlash 2's convolutions before and after it, channel by channel."""
        if self.shape.selector is None:
            return sublayer(x)
        base, dynamic = w[f"{name}.base_kernel"], (x @ w[f"{name}.kernel_projection.weight"].T).view(len(x), 2, 2, -1)

        def convolve(side: int, rows: Tensor) -> Tensor:
            kernel = base[side] + dynamic[:, side].repeat_interleave(GROUP, -1)  # [rows, tap, HIDDEN]
            out = kernel[:, 0] * rows
            out[1:] += kernel[1:, 1] * rows[:-1]
            return out

        return convolve(1, sublayer(convolve(0, x)))

    def attention(self, i: int, w: Mapping[str, Tensor], x: Tensor, context: Tensor) -> Tensor:
        anchor, visible = len(context), torch.cat([context, x])
        at = torch.arange(len(visible))
        q, k, v = (
            (each @ w[f"self_attn.{name}_proj.weight"].T).view(len(each), -1, SIZE)
            for name, each in (("q", x), ("k", visible), ("v", visible))
        )
        q = rotate(rms(q, w["self_attn.q_norm.weight"]), at[anchor:])
        k = rotate(rms(k, w["self_attn.k_norm.weight"]), at)
        seen = torch.tensor([[self.sees(i, anchor, row, key) for key in at.tolist()] for row in range(len(x))])
        return attended(q, k, v, seen) @ w["self_attn.o_proj.weight"].T

    def sees(self, layer: int, anchor: int, row: int, key: int) -> bool:
        """Whether slot `row` of the block sees position `key` of context and block."""
        if key >= anchor and self.shape.causal[layer] and key > anchor + row:
            return False
        window = self.shape.windows[layer]
        if window is None:
            return True
        if self.shape.from_anchor:
            return key >= anchor - window
        return key > anchor + row - window

    def step(self, slot: int, hidden: Tensor, token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the draft of a slot after `token`, and the state of a recurrent head."""
        kind, logits = self.shape.markov, self.head @ hidden
        if self.shape.selector is not None:
            return self.selected(logits, hidden, token), state
        if self.shape.num_plain is not None:
            state = self.gru(self.embedding[token], state)
            is_plain = slot < self.shape.first_slot + self.shape.num_plain
            inner = self.w["embed_proj.0.weight"] @ torch.cat([hidden, state])
            return logits + (not is_plain) * self.w["embed_proj.2.weight"] @ (inner * torch.sigmoid(inner)), state
        if kind is None:
            return logits, state
        w1, w2 = self.w["markov_head.markov_w1.weight"], self.w["markov_head.markov_w2.weight"]
        e = w1[token]
        if kind == "gated":
            gate = (
                self.w["markov_head.gate_proj.weight"] @ torch.cat([hidden, e]) + self.w["markov_head.gate_proj.bias"]
            )
            e = torch.sigmoid(gate) * e
        if kind == "rnn":
            joint = self.w["markov_head.joint_proj.weight"] @ torch.cat([state, e, hidden])
            gate, candidate, out = (joint + self.w["markov_head.joint_proj.bias"]).chunk(3)
            state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
            e = torch.tanh(out)
        return logits + w2 @ e, state

    def selected(self, logits: Tensor, hidden: Tensor, token: int) -> Tensor:
        """Scores of the candidates after `token`, -inf for the others."""
        assert self.shape.selector is not None
        _, scale, cap = self.shape.selector
        candidates = logits.topk(CANDIDATES).indices
        gated = self.w["candidate_selector.predecessor_codebook"][token] * (
            self.w["candidate_selector.hidden_projection.weight"] @ hidden
        )
        scores = scale * logits[candidates]
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        scores = scores + self.w["candidate_selector.successor_codebook"][candidates] @ gated
        return torch.full_like(logits, float("-inf")).scatter(0, candidates, scores)

    def gru(self, x: Tensor, state: Tensor) -> Tensor:
        """torch.nn.GRU's order of gates: reset, update, new."""
        of_input = (self.w["prefix_gru.weight_ih_l0"] @ x).chunk(3)
        of_state = (self.w["prefix_gru.weight_hh_l0"] @ state).chunk(3)
        reset, update = (torch.sigmoid(a + b) for a, b in zip(of_input[:2], of_state[:2], strict=True))
        return (1 - update) * torch.tanh(of_input[2] + reset * of_state[2]) + update * state

    def logits(self, text: list[int], drafts: list[int]) -> Tensor:
        """[D, V]: logits of the first drafts after `text`, each after the `drafts` before it; -inf for ids that the
        drafter does not know."""
        hidden, tokens = self.hidden(text), [text[-1], *drafts]
        state, rows = torch.zeros(self.state_size, dtype=torch.float64), []
        # Domino's state begins with the anchor, that of a Markov head with slot 0.
        for slot in range(self.first_of_state, len(drafts) + self.shape.first_slot):
            token = tokens[max(0, slot - self.shape.first_slot)]
            logits, state = self.step(slot, hidden[slot], token, state)
            rows.append(self.in_target(logits))
        return torch.stack(rows[-len(drafts) :])

    @property
    def first_of_state(self) -> int:
        return 0 if self.shape.num_plain is None else self.shape.first_slot

    @property
    def state_size(self) -> int:
        if self.shape.num_plain is not None:
            return self.w["prefix_gru.weight_hh_l0"].shape[1]
        return self.w["markov_head.markov_w1.weight"].shape[1] if self.shape.markov else 0

    def in_target(self, logits: Tensor) -> Tensor:
        if self.shape.known is None:
            return logits
        return logits.new_full((VOCAB,), float("-inf")).scatter(0, self.shape.known, logits)

    def confidence(self, text: list[int], drafts: list[int]) -> Tensor:
        """[D]: what the confidence head gives for each draft."""
        hidden, tokens = self.hidden(text)[self.shape.first_slot :], [text[-1], *drafts]
        w, b = self.w["confidence_head.proj.weight"][0], self.w["confidence_head.proj.bias"]
        found = []
        for slot in range(len(drafts)):
            e = (
                self.w["markov_head.markov_w1.weight"][tokens[slot]]
                if self.shape.confidence == "token"
                else hidden[0, :0]
            )
            found.append(torch.sigmoid(w @ torch.cat([hidden[slot], e]) + b))
        return torch.cat(found)


@cache
def hidden_states(*text: int) -> dict[int, Tensor]:
    """Of the target, by the index that transformers gives them; -1 is the last layer's output before the norm."""
    last, layers = CONFIG.num_layers, range(CONFIG.num_layers)
    tokens = torch.tensor([text])
    normed, outputs = TARGET.model(tokens, DenseMixer(CONFIG, len(text), "cpu"), tuple(layers))
    states = {0: TARGET.model.embed(tokens)} | {i + 1: outputs[i] for i in layers} | {last: normed, -1: outputs[-1]}
    return {index: state[0].double() for index, state in states.items()}


def zlab(**changes: Any) -> Published:
    """DFlash of z-lab: github.com/z-lab/dflash, dflash/model.py. With all keys of the published checkpoints."""
    config = {
        **DECODER, "architectures": ["DFlashDraftModel"], "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 5, "bos_token_id": None,
        "dtype": "bfloat16", "eos_token_id": 2, "initializer_range": 0.02, "max_window_layers": LAYERS,
        "rope_scaling": None, "transformers_version": "4.57.1", "use_cache": True,
        "num_target_layers": CONFIG.num_layers,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3], **changes.pop("own", {})},
        **changes.pop("keys", {}),
    }  # fmt: skip
    return Published(config, backbone(), (2, 4), first_slot=1, block_size=5, drafts=4, **changes)


def own_mask() -> Published:
    """The mask token has no row in the target's embedding."""
    base = zlab(own={"mask_token_id": VOCAB})
    return replace(base, shapes=base.shapes | {"mask_embedding": (HIDDEN,)})


def jetspec() -> Published:
    """github.com/hao-ai-lab/JetSpec, jetspec/models/draft_head.py."""
    return zlab(own={"causal_head": True}, causal=(True, True))


def deepspec(markov: str | None = None, confidence: bool = False, own: tuple[str, ...] = ()) -> Published:
    """DFlash and DSpark of DeepSpec: github.com/deepseek-ai/DeepSpec, deepspec/modeling/dspark. `own`: which of
    embedding and head are not the target's."""
    rank = 6 if markov else 0
    config = {
        **DECODER, "architectures": ["Qwen3DSparkModel"], "block_size": 5, "mask_token_id": MASK,
        "target_layer_ids": [-1, 2], "num_target_layers": CONFIG.num_layers, "num_anchors": 512,
        "enable_confidence_head": confidence, "markov_rank": rank,
    }  # fmt: skip
    shared = {"embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    shapes = backbone() | {name: shape for name, shape in shared.items() if name.split(".")[0] in own}
    shapes |= markov_shapes(markov, rank, VOCAB)
    if markov:
        config["markov_head_type"] = markov
    if confidence:
        config["confidence_head_with_markov"] = bool(markov)
        shapes |= confidence_shapes(rank)
    copies = tuple(name for name in shared if name.split(".")[0] not in own)
    return Published(
        config, shapes, (0, 3), first_slot=0, block_size=5, drafts=5, markov=markov, copies=copies,
        confidence=("token" if markov else "hidden") if confidence else None,
    )  # fmt: skip


def specforge_dspark(kind: str, prefix: str = "") -> Published:
    """github.com/sgl-project/SpecForge, specforge/modeling/draft/dspark.py."""
    own = {"projector_type": "dspark", "attention_mode": "gqa", "markov_rank": 6, "markov_head_type": kind}
    own |= {"enable_confidence_head": True, "confidence_head_with_markov": False}
    base = zlab(own=own, keys={"architectures": ["DSparkDraftModel"]})
    shapes = base.shapes | markov_shapes(kind, 6, VOCAB) | confidence_shapes(0)
    return replace(base, shapes=shapes, first_slot=0, drafts=5, markov=kind, confidence="hidden", prefix=prefix)


def domino(shift_label: bool, num_plain: int) -> Published:
    """github.com/sgl-project/SpecForge, specforge/modeling/draft/domino.py."""
    own = {"projector_type": "domino", "pure_draft_prefix_len": num_plain, "emb_dim": 7, "gru_hidden_dim": 9}
    base = zlab(own={**own, "shift_label": shift_label}, keys={"architectures": ["DominoDraftModel"]})
    shapes = {
        "prefix_gru.weight_ih_l0": (27, HIDDEN),
        "prefix_gru.weight_hh_l0": (27, 9),
        "embed_proj.0.weight": (7, HIDDEN + 9),
        "embed_proj.2.weight": (VOCAB, 7),
    }
    return replace(base, shapes=base.shapes | shapes, first_slot=0 if shift_label else 1, num_plain=num_plain)


def dflash_2() -> Published:
    """github.com/z-lab/dflash; the forward as in vLLM's qwen3_dflash2.py."""
    own = {"conv_kernel_size": 2, "conv_group_size": GROUP, "selector_rank": 6, "selector_top_k": CANDIDATES}
    own |= {"output_multiplier": 0.7, "final_logit_softcapping": 4.0, "input_embedding_scale": 1.3, "block_size": 5}
    sliding = {"layer_types": ["sliding_attention"] * LAYERS, "sliding_window": 6, "is_causal": False}
    base = zlab(own=own, keys={**sliding, "architectures": ["DFlash2DraftModel"]}, windows=(6, 6))
    return replace(base, shapes=base.shapes | selector_shapes(), selector=(1.3, 0.7, 4.0))


def selector_shapes() -> dict[str, tuple[int, ...]]:
    return {
        f"layers.{layer}.{name}_conv.{tensor}": shape
        for layer in range(LAYERS)
        for name in ("attention", "mlp")
        for tensor, shape in (
            ("base_kernel", (2, 2, HIDDEN)),
            ("kernel_projection.weight", (4 * HIDDEN // GROUP, HIDDEN)),
        )
    } | {
        "candidate_selector.hidden_projection.weight": (6, HIDDEN),
        "candidate_selector.predecessor_codebook": (VOCAB, 6),
        "candidate_selector.successor_codebook": (VOCAB, 6),
    }


def speculators_dflash_2() -> Published:
    """github.com/vllm-project/speculators, src/speculators/models/dflash2; what it leaves out is the default."""
    base = speculators(known=VOCAB, causal=False)
    keys = {"conv_kernel_size": 2, "conv_group_size": GROUP, "selector_rank": 6, "selector_top_k": CANDIDATES}
    config = {**base.config, **keys, "speculators_model_type": "dflash2", "architectures": ["DFlash2DraftModel"]}
    del config["sliding_window_non_causal"]
    return replace(base, config=config, shapes=base.shapes | selector_shapes(), selector=(1.0, 1.0, None))


def markov_shapes(kind: str | None, rank: int, known: int) -> dict[str, tuple[int, ...]]:
    if kind is None:
        return {}
    shapes: dict[str, tuple[int, ...]] = {"markov_w1.weight": (VOCAB, rank), "markov_w2.weight": (known, rank)}
    if kind == "gated":
        shapes |= {"gate_proj.weight": (rank, HIDDEN + rank), "gate_proj.bias": (rank,)}
    if kind == "rnn":
        shapes |= {"joint_proj.weight": (3 * rank, 2 * rank + HIDDEN), "joint_proj.bias": (3 * rank,)}
    return {f"markov_head.{name}": shape for name, shape in shapes.items()}


def confidence_shapes(rank: int) -> dict[str, tuple[int, ...]]:
    return {"confidence_head.proj.weight": (1, HIDDEN + rank), "confidence_head.proj.bias": (1,)}


def speculators(
    kind: str = "dflash",
    from_anchor: bool | None = None,
    known: int = 37,
    causal: bool = True,
    markov: str | None = None,
) -> Published:
    """github.com/vllm-project/speculators, src/speculators/models/dflash and dspark. The first layer slides."""
    first_slot, rank = (0 if from_anchor else 1), 6 if markov else 0
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(8))[:known].sort().values
    decoder = {key: value for key, value in DECODER.items() if key not in ("model_type", "tie_word_embeddings")}
    config = {
        "architectures": ["DFlashSpeculator" if kind == "dflash" else "DSparkSpeculator"],
        "aux_hidden_state_layer_ids": [0, 2, 4],
        "block_size": 5,
        "draft_vocab_size": known,
        "mask_token_id": MASK,
        "sliding_window_non_causal": not causal,
        "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5 - first_slot}]},
        "speculators_model_type": kind,
        "target_hidden_size": None,
        "transformer_layer_config": {
            **decoder, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6,
            "use_sliding_window": True,
        },
        **({} if from_anchor is None else {"sample_from_anchor": from_anchor}),
    }  # fmt: skip
    shapes = backbone(3) | {"embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (known, HIDDEN)}
    if kind == "dspark":
        config |= {"markov_rank": rank, "markov_head_type": markov, "enable_confidence_head": True}
        config["confidence_head_with_markov"] = True
        shapes |= markov_shapes(markov, rank, known) | confidence_shapes(rank)
    return Published(
        config, shapes, (0, 2, -1), first_slot, block_size=5, drafts=5 - first_slot, causal=(causal, False),
        windows=(6, None), from_anchor=True, markov=markov, confidence="token" if markov else None,
        known=ids if known < VOCAB else None,
    )  # fmt: skip


FAMILIES: dict[str, Published] = {
    "zlab": zlab(),
    "zlab window": zlab(
        keys={"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
        causal=(True, False), windows=(6, None),
    ),
    "zlab own mask": own_mask(),
    "jetspec": jetspec(),
    "deepspec dflash": deepspec(),
    "deepspec own embedding": deepspec(own=("embed_tokens",)),
    "deepspec own head": deepspec(own=("lm_head",)),
    "deepspec own both": deepspec(own=("embed_tokens", "lm_head")),
    "deepspec confidence": deepspec(confidence=True),
    "deepspec vanilla": deepspec("vanilla"),
    "deepspec gated": deepspec("gated", own=("lm_head",)),
    "deepspec rnn": deepspec("rnn"),
    "dspark confidence": deepspec("rnn", confidence=True),
    "specforge dspark": specforge_dspark("gated", prefix="logit_head."),
    "domino shifted": domino(shift_label=True, num_plain=1),
    "domino": domino(shift_label=False, num_plain=2),
    "dflash 2": dflash_2(),
    "speculators dflash": speculators(),
    "speculators dspark vanilla": speculators("dspark", from_anchor=True, markov="vanilla"),
    "speculators dspark rnn": speculators("dspark", from_anchor=False, markov="rnn", causal=False),
    "speculators dflash 2": speculators_dflash_2(),
    "speculators dflash bidirectional": speculators(from_anchor=False, causal=False),
    "speculators dflash from anchor": speculators(from_anchor=True, known=VOCAB),
}  # fmt: skip
