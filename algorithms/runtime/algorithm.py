"""What an algorithm is: a drafter in front of the engine's verify, accept and commit.

    state -> propose -> DraftTree -> target forward over N nodes -> accept -> commit -> observe -> state

A chain is a tree of width one, and autoregressive decoding is a tree of node 0 alone. So the engine has one loop, and
two runs differ in nothing but the drafter. `docs/add_an_algorithm.md` explains the contract with an example.

This file imports no torch, because algorithm files are read for their configuration before it is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    import torch

    from algorithms.runtime.backends.protocol import Backend
    from algorithms.runtime.models.config import DecoderConfig
    from algorithms.runtime.models.fusion import FusableModel
    from algorithms.runtime.models.loading import Target, TargetFolder
    from specdec_kernels import SamplingTensors, TreeLinks


@dataclass(frozen=True)
class Resources:
    """What the engine lends to the algorithm for one run."""

    target: Target
    backend: Backend
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    """Of stored keys and values: `dtype`, or float8_e4m3fn."""
    num_pages: int
    page_size: int
    context: int
    """Positions that a request may reach, drafts beyond its end included."""
    max_batch: int
    """Requests that the engine holds at most: running ones, and those whose prompts are prefilled ahead."""
    impl: str
    fused: bool = False
    """Whether models run fused kernels, or torch's operations one by one."""
    deterministic: bool = False
    """Whether the target gives a token the same bits whatever stands beside it."""
    confidence: bool = False
    """Whether drafts tell their confidence, by which the nodes of trees are chosen where steps differ in their number;
    those of a chain stand in order."""
    caches: list[Any] = field(default_factory=list)
    """Every `KVCache` of the run, the target's and the drafter's."""
    texts: list[Any] = field(default_factory=list)
    """Every `Texts` of the run, which drafters read; the engine writes them."""

    def choose_forward(self, model: FusableModel) -> None:
        """Let `model`, a target or a drafter, run the forward of this run. A drafter need not be deterministic: what it
        drafts is verified."""
        same = self.deterministic and model is self.target.model
        model.set_forward(self.impl if self.fused else None, batch_invariant=same)


class OwnLevel(NamedTuple):
    """How much of a step an algorithm insists on capturing, and the setting that says so, as it is typed."""

    level: str
    setting: str


@dataclass(frozen=True)
class Batch:
    """The running requests as device tensors, one row each. Under a captured graph some rows are padding."""

    lengths: torch.Tensor
    """[B] int64: committed tokens whose KV is in the cache (L)."""
    last_tokens: torch.Tensor
    """[B] int64: the last committed token, at position L, not yet in the cache. It is node 0 of every tree."""
    page_table: torch.Tensor
    """[B, max_pages] int32."""
    history: torch.Tensor
    """[B, context] int64: tokens by position, of which 0 … L are committed."""
    active: torch.Tensor
    """[B] int32: 1, or 0 for a padding row, which must touch no cache and no store."""
    sampling: SamplingTensors
    rows: slice | torch.Tensor
    """Rows of the engine's state that these are, a slice in every step: where a drafter keeps what it remembers of a
    request. In prefill it is [B] int64, and several rows may belong to one request."""
    max_length: int
    """Host bound on L over the batch."""


@dataclass(frozen=True)
class DraftTree:
    """What is to be verified: `tokens [B, N]` int64 with the last committed token at node 0, and the tree's links."""

    tokens: torch.Tensor
    links: TreeLinks
    draft_probs: torch.Tensor | None = None
    """[B, R, V] float32: what drafts were drawn from, for the rules for drawn drafts. Row n is that of the children of
    node n, R = N - 1, unless `draft_rows` says otherwise."""
    draft_rows: torch.Tensor | None = None
    """[B, N] int32, for drawn trees: the row of `draft_probs` that the children of each node were drawn from."""
    strength: torch.Tensor | None = None
    """[B] float32: accepted drafts that the drafter itself expects, for `algo=mixed`; None where it does not say."""
    confidence: torch.Tensor | None = None
    """[B, N] float32: how likely the drafter thinks the path from node 0 to each node is, 1 at node 0 and 0 at unused
    nodes, for trees with `runtime.adaptive`; None where it does not say."""


class Prompts(NamedTuple):
    """The prompts whose tokens a prefill observes, one entry each, and entries of padding behind them. A prompt may
    fill several rows of the observation, one behind the other."""

    rows: torch.Tensor
    """[P] int64: the row of the engine's state, or for padding `max_batch`, the spare row behind them."""
    start: torch.Tensor
    """[P] int64: the first position that is observed. It is 0 for a new request, and only for that."""
    counts: torch.Tensor
    """[P] int32: how many positions are observed; 0 for a prompt of one token, and for padding."""
    last: torch.Tensor
    """[P] int64: where the last of them stands, b * n + column for column of row b."""
    width: int
    """Host bound on `counts`."""


@dataclass(frozen=True)
class Observation:
    """What the target has just computed for committed tokens, in text order.

    Row b covers positions L … L + counts[b] - 1; columns past `counts[b]` are meaningless. After a step a row is a
    request. In prefill a row is a tile of a prompt, and `prompts` says which rows belong together.
    """

    batch: Batch
    """The rows. `lengths` is L before these tokens; `history` holds them and the new last token already."""
    tokens: torch.Tensor
    """[B, n] int64: the tokens at these positions."""
    next_tokens: torch.Tensor
    """[B, n] int64: the token that follows each; behind the last one of a row stands its new last token."""
    features: list[torch.Tensor]
    """One [B, n, hidden] per captured target layer."""
    hidden: torch.Tensor
    """[B, n, hidden]: the target's last hidden states, after the final norm."""
    positions: torch.Tensor
    """[B, n] int64: L + column."""
    counts: torch.Tensor
    """[B] int32; 0 for a padding row."""
    prompts: Prompts | None = None
    """In prefill only."""
    altered: bool = False
    """Whether what the drafter kept of its drafts may not belong to these tokens: others than it drafted may have been
    verified, or nothing was drafted behind them. After steps without a draft, several tokens are observed at once."""

    @property
    def is_prefill(self) -> bool:
        """Whether this is a part of prompts."""
        return self.prompts is not None


class AttentionCalls(NamedTuple):
    """The attention of a model over the paged cache: the shape of its layers, and the mode of each phase that it runs
    in."""

    config: DecoderConfig
    modes: dict[str, str]


class Algorithm:
    """Base of all algorithms. A subclass names itself, its configuration and the size of its trees, and drafts.

    `propose` and `observe` run on the device without reading anything back, and on the same tensors in every step, so
    they can be captured in a CUDA graph. So can the observation of prompts.
    """

    name: ClassVar[str]
    Config: ClassVar[type]
    """A dataclass with a field `name` whose default is the algorithm's name; its fields are the settings `algo.…`."""
    needs_draft_model: bool = False
    tells_strength: ClassVar[bool] = False
    """Whether its drafts say how many of them it expects to be accepted."""

    capture: tuple[int, ...] = ()
    """Target layers whose output `observe` receives."""
    num_nodes: int = 1
    """N: nodes verified per step, node 0 included."""
    max_depth: int = 0
    """D: most drafts that one step can accept."""
    chain: bool = True
    """Whether the parent of node i is node i - 1: nothing moves at commit, and attention needs no bit mask."""
    rule: str = "target_only"
    """Acceptance rule, see `specdec_kernels.accept`."""
    graph: str | None = None
    """How much of a step is captured, where the algorithm insists; None leaves it to the run (`runtime.graph`)."""
    draft_slots: int = 0
    """Positions behind L that the drafter writes in its own cache, where that is more than `num_nodes`."""

    @classmethod
    def graph_of(cls, config: Any) -> OwnLevel | None:
        """What `graph` will be; asked before anything loads."""
        return None

    @classmethod
    def drafter_for(cls, config: Any) -> str | None:
        """Name under which `model.drafts` has the drafter; None for an algorithm that drafts without a model."""
        return cls.name if cls.needs_draft_model else None

    @classmethod
    def check(cls, config: Any, target: TargetFolder, draft_path: str | None) -> AttentionCalls | None:
        """Raise the ValueError that `__init__` would raise, as far as folders tell without reading any weight.

        Returns what the attention backend must serve for the drafter, None where it has no cache.
        """
        return None

    @classmethod
    def drafter_folder(cls, draft_path: str | None) -> str:
        """`draft_path`; ValueError if it is None, for an algorithm that drafts with a model."""
        if draft_path is None:
            raise ValueError(f"algo={cls.name} needs a drafter: set model.draft_path to a folder or hub name")
        return draft_path

    def __init__(self, config: Any, target: Target, draft_path: str | None) -> None:
        """Load what is needed, or raise ValueError; `draft_path` is a folder or hub name."""

    def attach(self, resources: Resources) -> None:
        """Allocate caches for one run; called once, before any `propose`."""

    def propose(self, batch: Batch) -> DraftTree:
        """Draft a tree behind the last token of each row."""
        raise NotImplementedError

    def propose_few(self, batch: Batch, num_nodes: int) -> DraftTree:
        """Draft a tree of `num_nodes`, from 2 to one less than N, for `runtime.adaptive`. Of a larger tree the first
        nodes are verified, which is what an algorithm gets that does not care."""
        return self.propose(batch)

    def inspect(self, batch: Batch, tree: DraftTree, logits: torch.Tensor, sampling: SamplingTensors) -> None:
        """Look at what the target says about a draft, before acceptance, in steps that draw; for studies. `logits` are
        [B, N, V], behind penalties and constraints, and `sampling` is what acceptance takes."""

    @property
    def learns(self) -> bool:
        """Whether the drafts for a request depend on requests that were served before it: where there is something to
        forget, unless it says otherwise."""
        return type(self).forget is not Algorithm.forget

    def observe(self, seen: Observation) -> None:
        """Learn from committed tokens: after each chunk of prompts, and after every step."""

    def forget(self) -> None:
        """Drop what former requests taught about text. Tensors keep their addresses, because steps may be captured."""

    def move_row(self, source: int, target: int) -> None:
        """The request of state row `source` now lives in row `target`."""
