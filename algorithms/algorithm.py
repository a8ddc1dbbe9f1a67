"""The interface of algorithms: a drafter in front of the engine's verify, accept and commit.

    state -> propose -> DraftTree -> target forward over N nodes -> accept -> commit -> observe -> state

A chain is a tree of width one, and autoregressive decoding is a tree of node 0 alone. `docs/add_an_algorithm.md`
explains the contract with an example. This file imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    import torch

    from algorithms.attention.backends.protocol import Backend
    from algorithms.models.config import DecoderConfig
    from algorithms.models.fusion import FusableModel
    from algorithms.models.loading import Target, TargetFolder
    from specdec_kernels import SamplingTensors, TreeLinks


@dataclass(frozen=True)
class Resources:
    """Resources that the engine gives to the algorithm for one run."""

    target: Target
    backend: Backend
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype  # the dtype of stored keys and values: `dtype`, or float8_e4m3fn
    num_pages: int
    page_size: int
    context: int  # positions that a request may reach, drafts beyond its end included
    max_batch: int  # slots: requests that run, and those whose prompts are prefilled ahead
    impl: str
    fused: bool = False  # whether models run fused kernels, or torch's operations one by one
    deterministic: bool = False
    """Whether the target computes a token bit for bit alike, regardless of the rest of the batch."""
    needs_path_probs: bool = False
    """Whether trees must have `path_probs`: with `runtime.adaptive`, a step verifies the most likely nodes."""
    caches: list[Any] = field(default_factory=list)  # every `KVCache` of the run, the target's and the drafter's
    histories: list[Any] = field(default_factory=list)
    """Every `TokenHistories` of the run, which drafters read; the engine writes them."""

    def choose_forward(self, model: FusableModel) -> None:
        """Set the forward of `model`, a target or a drafter. A drafter need not be deterministic."""
        same = self.deterministic and model is self.target.model
        model.set_forward(self.impl if self.fused else None, batch_invariant=same)


@dataclass(frozen=True)
class Batch:
    """The running requests as device tensors, one slot each. In a captured step some slots are padding."""

    lengths: torch.Tensor  # [B] int64: committed tokens whose KV is in the cache (L)
    last_tokens: torch.Tensor
    """[B] int64: the last committed token, at position L, not yet in the cache. It is node 0 of every tree."""
    page_table: torch.Tensor  # [B, max_pages] int32
    history: torch.Tensor  # [B, context] int64: tokens by position, of which 0 … L are committed
    active: torch.Tensor  # [B] int32: 1, or 0 for a padding slot, which must touch no cache and no store
    sampling: SamplingTensors
    slots: slice | torch.Tensor
    """Batch slots, which index what a drafter stores: a slice in steps, [B] int64 in prefill, repeats included."""
    max_length: int  # host bound on L over the batch
    filtered: bool = False  # whether a request of the step filters the tokens that it samples
    adjust: Callable[[torch.Tensor, int, torch.Tensor | None], None] = lambda logits, depth, vocabulary: None
    """Changes logits of drafts in place as penalties, bias and forbidden tokens ask: `step.batch.DraftAdjustment`."""


@dataclass(frozen=True)
class DraftTree:
    """The tree that a step verifies: `tokens [B, N]` int64 with the last committed token at node 0, and its links."""

    tokens: torch.Tensor
    links: TreeLinks
    draft_probs: torch.Tensor | None = None
    """[B, R, V] float32: the distributions that drafts were sampled from. Row n belongs to the children
    of node n, R = N - 1, unless `draft_rows` says otherwise."""
    draft_rows: torch.Tensor | None = None
    """[B, N] int32, for sampled trees: the row of `draft_probs` that the children of each node were sampled from."""
    path_probs: torch.Tensor | None = None
    """[B, N] float32: how likely the drafter thinks the path from node 0 to each node is, 1 at node 0 and 0 at unused
    nodes, for trees with `runtime.adaptive`; None where it does not say."""


class Prompts(NamedTuple):
    """The prompts that a prefill observes, one entry each, then padding. A prompt may have several successive rows."""

    slots: torch.Tensor  # [P] int64: batch slots; padding has the dummy slot, `max_batch`
    start: torch.Tensor  # [P] int64: the first position that is observed. It is 0 for a new request, and only for that.
    counts: torch.Tensor  # [P] int32: how many positions are observed; 0 for a prompt of one token, and for padding
    last: torch.Tensor  # [P] int64: index of the last of them: b * n + column, for row b
    width: int  # host bound on `counts`


class Verified(NamedTuple):
    """Results of the target for all nodes of a step's trees, accepted or not."""

    tokens: torch.Tensor  # [B, N] int64; entries of unused nodes mean nothing
    links: TreeLinks
    hidden: torch.Tensor
    """[B, N, hidden]: last hidden states, after the final norm. `resources.target.model.logits` gives their logits."""


@dataclass(frozen=True)
class Observation:
    """Results of the target for tokens just committed, by position. Row b has positions L to L + counts[b] - 1; later
    columns mean nothing. A row is a request, or in prefill a tile of a prompt, and `prompts` says of which."""

    batch: Batch  # the rows. `lengths` is L before these tokens; `history` holds them and the new last token already.
    tokens: torch.Tensor  # [B, n] int64: the tokens at these positions
    next_tokens: torch.Tensor
    """[B, n] int64: the token that follows each; after the last one of a row that is its new last token."""
    features: list[torch.Tensor]  # one [B, n, hidden] per captured target layer
    hidden: torch.Tensor  # [B, n, hidden]: the target's last hidden states, after the final norm
    positions: torch.Tensor  # [B, n] int64: L + column
    counts: torch.Tensor  # [B] int32; 0 for a padding slot
    prompts: Prompts | None = None  # in prefill only
    verified: Verified | None = None
    """All nodes of the step, with `observes_verified`; None in prefill and after steps without a draft."""
    drafts_stale: bool = False
    """Whether the drafter's state of its drafts may not fit: other drafts were verified, or none followed."""

    @property
    def is_prefill(self) -> bool:
        return self.prompts is not None


class AttentionCalls(NamedTuple):
    """The attention of a model over the paged cache: the shape of its layers, and the mode of each phase."""

    config: DecoderConfig
    modes: dict[str, str]


class Algorithm:
    """A subclass names itself, its configuration and the size of its trees. `propose` and `observe` read nothing back
    and run on the same tensors in every step, so that they can be captured in a CUDA graph."""

    name: ClassVar[str]
    Config: ClassVar[type]
    """A dataclass with a field `name` whose default is the algorithm's name; its fields are the settings `algo.…`."""
    needs_draft_model: bool = False
    finds_draft_model: bool = False  # whether the target's own folder may hold the drafter, where none is named
    loaded_for: Target | None = None  # the target that `algorithms.load_algorithm` loaded its draft model for

    target_layers: tuple[int, ...] = ()  # target layers whose output `observe` receives
    observes_verified: bool = False
    """Whether `observe` receives all verified nodes, rejected ones too: `Observation.verified`."""
    num_nodes: int = 1  # N: nodes verified per step, node 0 included
    max_depth: int = 0  # D: most drafts that one step can accept
    chain: bool = True
    """Whether the parent of node i is node i - 1: nothing moves at commit, and attention needs no bit mask."""
    rule: str = "target_only"  # acceptance rule, see `specdec_kernels.accept`
    recorder: Algorithm | None = None
    """Decodes all requests first; `propose` then finds their outputs in `Batch.history`, behind position L."""
    draft_slots: int = 0
    """Positions from L on that the drafter writes in its own cache, where that is more than `num_nodes`."""

    @classmethod
    def drafter_for(cls, config: Any) -> str | None:
        """Name under which `model.drafts` has the drafter; None for an algorithm that drafts without a model."""
        return cls.name if cls.needs_draft_model else None

    @classmethod
    def check(cls, config: Any, target: TargetFolder, draft_path: str | None) -> AttentionCalls | None:
        """Raise the ValueError that `__init__` would raise, as far as folders show without reading any weight. Returns
        what the attention backend must serve for the drafter, None where it has no cache."""
        return None

    @classmethod
    def drafter_folder(cls, draft_path: str | None) -> str:
        """`draft_path`; ValueError if it is None, for an algorithm that drafts with a model."""
        if draft_path is None:
            settings = "model.draft_path (from Python: draft=…)"
            raise ValueError(f"algo={cls.name} needs a drafter: set {settings} to a folder or hub name")
        return draft_path

    def __init__(self, config: Any, target: Target, draft_path: str | None) -> None:
        """Load what is needed, or raise ValueError; `draft_path` is a folder or hub name."""

    def bind(self, resources: Resources) -> None:
        """Allocate caches for one run; called once, before any `propose`."""

    def propose(self, batch: Batch) -> DraftTree:
        """Draft a tree after the last token of each slot. Default: `propose_few` with all N nodes."""
        if type(self).propose_few is Algorithm.propose_few:
            raise NotImplementedError
        return self.propose_few(batch, self.num_nodes)

    def propose_few(self, batch: Batch, num_nodes: int) -> DraftTree:
        """Draft `num_nodes`, 2 to N - 1, for `runtime.adaptive`; by default the first nodes of `propose`'s tree."""
        return self.propose(batch)

    def inspect(self, batch: Batch, tree: DraftTree, logits: torch.Tensor, sampling: SamplingTensors) -> None:
        """Look at the logits `[B, N, V]` of a draft before acceptance, after penalties and constraints, if sampling."""

    @property
    def learns(self) -> bool:
        """Whether drafts depend on requests that were served before; by default, whether there is a `reset`."""
        return type(self).reset is not Algorithm.reset

    def observe(self, seen: Observation) -> None:
        """Learn from committed tokens: after each prefill batch, and after every step."""

    def reset(self) -> None:
        """Drop what earlier requests have left. Tensors keep their addresses, because steps may be captured."""

    def move_slot(self, source: int, target: int) -> None:
        """The request of slot `source` is now in slot `target`."""
