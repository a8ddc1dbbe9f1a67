"""Shape and conventions of a block drafter, with the keys of the published z-lab checkpoints (arXiv 2602.06036).

`loading` rewrites the configs of other writers in these keys. Other engines' keys of `dflash_config` are read as in
vLLM (`qwen3_dflash.py`): `use_swa` gives every layer a window where `layer_types` name none, `swa_window_size` is that
window, sliding layers of `layer_types` are causal, and `causal`, `is_causal` or `causal_head` (JetSpec) decides for all
layers. `slots`, `window_origin` and `reads_final_norm` are keys of this project.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, Any

from algorithms.checked import Between, Checked
from algorithms.models.architectures import FULL, SLIDING, Windows, read_layer_types, write_layer_types
from algorithms.models.config import EMBEDDING_LAYER, DecoderConfig
from algorithms.models.config_keys import nested, read_size, read_sizes, required, write_fields
from specdec_kernels.checks import expect_at_least, expect_between, expect_choice

DEFAULT_BLOCK_SIZE = 16
MAX_CANDIDATES = 32  # most candidates that a selector's kernels take
OWN, NEXT = SLOTS = ("own", "next")
"""What slot k of a block drafts, counted from the last committed token: k (slot 0 drafts nothing), or k + 1."""
QUERY, ANCHOR = WINDOW_ORIGINS = ("query", "anchor")
"""A window of W counts from each query, W - 1 positions back, or from the last token, W positions for all."""
VANILLA, GATED, RNN = MARKOV_HEADS = ("vanilla", "gated", "rnn")
GRU, SELECTOR = "gru", "selector"  # the heads of Domino and DFlash 2
DOMINO_PROJECTORS = ("domino", "causal_v5")
HIDDEN, HIDDEN_AND_TOKEN = "hidden", "hidden+token"
"""What a confidence head reads: the slot's hidden state, or also the token before, as the Markov head embeds it."""
CAUSAL_KEYS = ("causal", "is_causal", "causal_head")
_SELECTOR = {"rank": "selector_rank", "num_candidates": "selector_top_k"}
_GRU_SIZES = {"rank": "emb_dim", "state_size": "gru_hidden_dim"}
_GRU = _GRU_SIZES | {"num_plain": "pure_draft_prefix_len"}
_CONV = {"taps": "conv_kernel_size", "group": "conv_group_size"}
"""Fields and keys of heads and convolutions."""


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The published rule: one draft layer reads the middle, several read evenly spaced layers 1 … N-3."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    if num_target_layers < 4:
        raise ValueError(f"default target_layer_ids need num_target_layers >= 4, got {num_target_layers}")
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers))


@dataclass(frozen=True)
class HeadConfig:
    """A head that corrects each draft by those before it."""

    kind: str
    """One of `MARKOV_HEADS`, `GRU` or `SELECTOR`."""
    rank: int
    """Width of the matrices whose product gives the correction."""
    state_size: int = 0
    """Width of a GRU's state."""
    num_plain: int = 0
    """First drafts that a GRU does not correct."""
    num_candidates: int = 0
    """Tokens of each position that a selector chooses from."""

    def __post_init__(self) -> None:
        expect_choice("markov_head_type", self.kind, (*MARKOV_HEADS, GRU, SELECTOR))
        expect_at_least("pure_draft_prefix_len", self.num_plain, 0)
        expect_between("selector_top_k", self.num_candidates, int(self.kind == SELECTOR), MAX_CANDIDATES)
        expect_at_least("rank of the head", self.rank, 1)
        expect_at_least("gru_hidden_dim", self.state_size, int(self.kind == GRU))

    def to_hf(self) -> dict[str, Any]:
        if self.kind in MARKOV_HEADS:
            return {"markov_rank": self.rank, "markov_head_type": self.kind}
        if self.kind == SELECTOR:
            return write_fields(self, _SELECTOR)
        return {"projector_type": DOMINO_PROJECTORS[0], **write_fields(self, _GRU)}


@dataclass(frozen=True)
class ConvConfig:
    """Convolutions before and after attention and MLP of every layer: taps, and channels that share a coefficient."""

    taps: int
    group: int


@dataclass(frozen=True)
class DFlashConfig(Checked):
    """Shape of a block drafter: `decoder` describes its layers, sliding windows included."""

    decoder: DecoderConfig
    block_size: Annotated[int, Between(1)]
    target_layer_ids: tuple[int, ...]
    """Target layers whose output is read, -1 for that of the embedding."""
    mask_token_id: int
    """The target's token in the place of a draft; `vocab_size` is an embedding that the drafter owns."""
    num_target_layers: int
    causal_layers: tuple[bool, ...]
    """Whether each layer is causal inside the block."""
    slots: Annotated[str, SLOTS] = OWN
    window_origin: Annotated[str, WINDOW_ORIGINS] = QUERY
    reads_final_norm: bool = True
    """Whether the output of the target's last layer is read after the final norm."""
    embed_scale: float = 1.0
    """Factor of the embeddings of a block."""
    logit_scale: float = 1.0
    """Factor of the logits, before the cap."""
    logit_soft_cap: float | None = None
    """Logits s of drafts become logit_soft_cap * tanh(s / logit_soft_cap)."""
    conv: ConvConfig | None = None
    head: HeadConfig | None = None
    confidence: str | None = None
    """What a confidence head reads, `HIDDEN` or `HIDDEN_AND_TOKEN`; None: there is none."""
    draft_vocab_size: int | None = None
    """Tokens that the drafter knows; None is all of the target's."""
    owns_embedding: bool = False
    owns_head: bool = False
    """Whether the drafter has an embedding, and an LM head, that are not the target's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.confidence == HIDDEN_AND_TOKEN and (self.head is None or self.head.kind not in MARKOV_HEADS):
            raise ValueError("confidence_head_with_markov: expected a Markov head, got markov_rank 0")
        if len(self.causal_layers) != self.decoder.num_layers:
            raise ValueError(f"causal_layers: expected {self.decoder.num_layers} entries, got {self.causal_layers}")
        if self.conv is not None and (hidden := self.decoder.hidden_size) % self.conv.group:
            raise ValueError(f"conv_group_size: expected a divisor of hidden_size={hidden}, got {self.conv.group}")
        expect_between("output_multiplier", self.logit_scale, 0, inf, above=True)
        expect_between("final_logit_softcapping", self.logit_soft_cap, 0, inf, above=True, nullable=True)
        outside = [i for i in self.target_layer_ids if not EMBEDDING_LAYER <= i < self.num_target_layers]
        if outside or not self.target_layer_ids:
            raise ValueError(
                f"target_layer_ids: expected 0 to {self.num_target_layers - 1}, or -1 for the embedding, got "
                f"{list(self.target_layer_ids)}"
            )
        if self.window_origin == ANCHOR and any(self.sliding_causal) and not all(self.sliding_causal):
            raise ValueError(f"causal_layers: expected one value for all sliding layers, got {self.causal_layers}")
        expect_between("mask_token_id", self.mask_token_id, 0, self.decoder.vocab_size)
        expect_between("draft_vocab_size", self.draft_vocab_size, 1, self.decoder.vocab_size, nullable=True)

    @property
    def _windows(self) -> Windows:
        return self.decoder.sliding_windows or (None,) * self.decoder.num_layers

    @property
    def sliding_causal(self) -> tuple[bool, ...]:
        """Whether each sliding layer is causal."""
        return tuple(causal for causal, window in zip(self.causal_layers, self._windows, strict=True) if window)

    @property
    def num_known(self) -> int:
        """V_d: tokens that the drafter knows."""
        return self.draft_vocab_size or self.decoder.vocab_size

    @property
    def first_slot(self) -> int:
        return 1 if self.slots == OWN else 0

    def num_drafts(self, block_size: int) -> int:
        """Drafts of a block of this size. Domino leaves the last slot unused where the first one drafts."""
        has_gru = self.head is not None and self.head.kind == GRU
        return block_size - (1 if has_gru else self.first_slot)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DFlashConfig:
        """Read a published drafter `config.json`; an entry of `dflash_config` wins over the same top-level key."""
        merged = {**config, **nested(config, "dflash_config")}
        # `layer_types` alone decides about windows here; `use_sliding_window` is ignored.
        decoder = DecoderConfig.from_hf({**config, "layer_types": None, "use_sliding_window": False})
        num_target_layers = read_size("num_target_layers", required(merged, "num_target_layers"))
        ids = merged.get("target_layer_ids", merged.get("layer_ids"))
        if ids is None:
            ids = default_target_layer_ids(num_target_layers, decoder.num_layers)
        windows, causal = _read_attention(merged, decoder.num_layers)
        confidence = HIDDEN_AND_TOKEN if merged.get("confidence_head_with_markov") else HIDDEN
        cap = merged.get("final_logit_softcapping") or None
        known = read_size("draft_vocab_size", merged.get("draft_vocab_size") or decoder.vocab_size)
        return cls(
            decoder=replace(decoder, sliding_windows=windows),
            block_size=read_size("block_size", merged.get("block_size", DEFAULT_BLOCK_SIZE)),
            target_layer_ids=tuple(int(i) for i in ids),
            mask_token_id=int(required(merged, "mask_token_id")),
            num_target_layers=num_target_layers,
            causal_layers=causal,
            slots=merged.get("slots", OWN),
            window_origin=merged.get("window_origin", QUERY),
            reads_final_norm=bool(merged.get("reads_final_norm", True)),
            embed_scale=float(merged.get("input_embedding_scale") or 1.0),
            logit_scale=float(merged.get("output_multiplier") or 1.0),
            logit_soft_cap=None if cap is None else float(cap),
            conv=ConvConfig(**read_sizes(merged, _CONV)) if merged.get("conv_kernel_size") else None,
            head=_read_head(merged),
            confidence=confidence if merged.get("enable_confidence_head") else None,
            draft_vocab_size=None if known == decoder.vocab_size else known,
        )

    def to_hf(self) -> dict[str, Any]:
        """The keys that `from_hf` reads; ValueError where they cannot say which layers are causal."""
        own: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "slots": self.slots,
        }
        if self.causal_layers != tuple(map(bool, self._windows)):
            if len(set(self.causal_layers)) > 1:
                raise ValueError(f"causal_layers: expected all or none, or those that slide, got {self.causal_layers}")
            own["causal"] = self.causal_layers[0]
        for field, (key, default) in _OPTIONAL_KEYS.items():
            if getattr(self, field) != default:
                own[key] = getattr(self, field)
        if self.conv is not None:
            own |= write_fields(self.conv, _CONV)
        head, confidence = self.head, self.confidence
        if confidence is not None:
            own |= {"enable_confidence_head": True, "confidence_head_with_markov": confidence == HIDDEN_AND_TOKEN}
        return {
            **replace(self.decoder, sliding_windows=()).to_hf(),
            "architectures": ["DFlashDraftModel"],
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": own,
            **({} if head is None else head.to_hf()),
            **write_layer_types(self.decoder.sliding_windows, self.decoder.num_layers),
        }


_OPTIONAL_KEYS = {
    "window_origin": ("window_origin", QUERY),
    "reads_final_norm": ("reads_final_norm", True),
    "embed_scale": ("input_embedding_scale", 1.0),
    "logit_scale": ("output_multiplier", 1.0),
    "logit_soft_cap": ("final_logit_softcapping", None),
    "draft_vocab_size": ("draft_vocab_size", None),
}
"""Keys that are written where a field is not at its default."""


def _read_head(merged: Mapping[str, Any]) -> HeadConfig | None:
    if merged.get("selector_rank"):
        return HeadConfig(SELECTOR, **read_sizes(merged, _SELECTOR))
    if merged.get("projector_type") in DOMINO_PROJECTORS:
        num_plain = int(merged.get("pure_draft_prefix_len") or 0)
        return HeadConfig(GRU, **read_sizes(merged, _GRU_SIZES), num_plain=num_plain)
    if merged.get("projector_type") is not None:
        raise ValueError(f"projector_type '{merged['projector_type']}' is not supported, expected dspark or domino")
    rank = int(merged.get("markov_rank") or 0)
    return HeadConfig(str(merged.get("markov_head_type", VANILLA)).lower(), rank) if rank else None


def _read_attention(merged: Mapping[str, Any], num_layers: int) -> tuple[Windows, tuple[bool, ...]]:
    """Windows of the layers, and which of them are causal inside the block."""
    layer_types = merged.get("layer_types") or [FULL] * num_layers
    given = {key: bool(merged[key]) for key in CAUSAL_KEYS if merged.get(key) is not None}
    causal = set(given.values())
    if len(causal) > 1:
        raise ValueError(f"{' and '.join(given)}: expected one value, got {', '.join(map(str, given.values()))}")
    by_layer = tuple(bool(next(iter(causal))) if causal else kind == SLIDING for kind in layer_types)
    if merged.get("use_swa") and SLIDING not in layer_types:
        layer_types = [SLIDING] * num_layers
    window = merged.get("swa_window_size") or merged.get("sliding_window")
    return read_layer_types(layer_types, window, num_layers), by_layer
