"""What an algorithm is: a drafter in front of the engine's verify, accept and commit.

    state -> propose -> DraftTree -> target forward over N nodes -> accept -> commit -> observe -> state

A chain is a tree of width one and autoregressive decoding is a tree of the root alone, so the engine has one loop and
two runs differ in nothing but the drafter. This file imports no torch: algorithm files are read for their
configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    import torch

    from algorithms.runtime.backends import Backend
    from algorithms.runtime.models.loading import Target, TargetShape
    from algorithms.runtime.state import SamplingState
    from specdec_kernels import TreeLinks


@dataclass(frozen=True)
class Resources:
    """What the engine lends to the algorithm for one run."""

    target: Target
    backend: Backend
    device: torch.device
    dtype: torch.dtype
    num_pages: int
    page_size: int
    context: int
    """Positions a request may reach, drafts beyond its end included."""
    max_batch: int
    impl: str


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
    """[B] int64: the last committed token, at position L, not yet in the cache."""
    page_table: torch.Tensor
    """[B, max_pages] int32."""
    history: torch.Tensor
    """[B, context + 1] int64: tokens by position, of which 0 … L are committed; the last column is scratch."""
    active: torch.Tensor
    """[B] int32: 1, or 0 for a padding row, which must touch no cache and no store."""
    sampling: SamplingState
    rows: slice
    """Rows of the engine's state that these are: where a drafter keeps what it remembers of a request."""
    max_length: int
    """Host bound on L over the batch."""


@dataclass(frozen=True)
class DraftTree:
    """What is to be verified: `tokens [B, N]` int64 with the root at node 0, and how the nodes hang together."""

    tokens: torch.Tensor
    links: TreeLinks
    draft_probs: torch.Tensor | None = None
    """[B, N - 1, V] float32: the law each drafted node was drawn from, for the rules `rejection` and `block`."""


@dataclass(frozen=True)
class Observation:
    """What the target has just computed for committed tokens, in text order.

    Row b covers positions `start[b] … start[b] + counts[b] - 1`; columns past `counts[b]` are meaningless.
    """

    tokens: torch.Tensor
    """[B, n] int64: the tokens at these positions."""
    next_tokens: torch.Tensor
    """[B, n] int64: the token that follows each; behind the last of a row stands its new root."""
    features: list[torch.Tensor]
    """One [B, n, hidden] per captured target layer."""
    hidden: torch.Tensor
    """[B, n, hidden]: the target's last hidden states, after the final norm."""
    start: torch.Tensor
    """[B] int64."""
    positions: torch.Tensor
    """[B, n] int64: start + column."""
    counts: torch.Tensor
    """[B] int32; 0 for a padding row."""
    history: torch.Tensor
    """[B, context + 1] int64: as in `Batch`, these tokens and the new root included."""
    page_table: torch.Tensor
    """[B, max_pages] int32."""
    rows: slice
    """Rows of the engine's state."""
    max_length: int
    """Host bound on `start` over the batch."""
    is_prefill: bool = False


class Algorithm:
    """Base of all algorithms. A subclass names itself, its configuration, the size of its trees, and drafts.

    `propose` and `observe` run on the device without reading anything back, and on the same tensors every step: then
    they can be captured in a CUDA graph.
    """

    name: ClassVar[str]
    Config: ClassVar[type]
    needs_draft_model: ClassVar[bool] = False

    capture: tuple[int, ...] = ()
    """Target layers whose output `observe` receives."""
    num_nodes: int = 1
    """N: nodes verified a step, the root included."""
    max_depth: int = 0
    """D: most drafts that one step can accept."""
    chain: bool = True
    """Whether node i hangs on node i - 1: nothing moves at commit, and attention needs no bit mask."""
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
    def check(cls, config: Any, target: TargetShape, draft_path: str | None) -> None:
        """Refuse (ValueError) what `__init__` would, as far as folders tell without any weight being read."""

    @classmethod
    def drafter_folder(cls, draft_path: str | None) -> str:
        """`draft_path`, which an algorithm that drafts with a model must be given."""
        if draft_path is None:
            raise ValueError(f"algo={cls.name} needs a drafter: set model.draft_path to a folder or hub name")
        return draft_path

    def __init__(self, config: Any, target: Target, draft_path: str | None) -> None:
        """Load what is needed, or refuse; `draft_path` is a folder or hub name."""

    def attach(self, resources: Resources) -> None:
        """Allocate caches for one run; called once, before any `propose`."""

    def propose(self, batch: Batch) -> DraftTree:
        """Draft a tree behind every root."""
        raise NotImplementedError

    def observe(self, seen: Observation) -> None:
        """Learn from committed tokens: after prefill, and after every step."""

    def forget(self) -> None:
        """Drop what former requests taught about text. Tensors keep their addresses: steps may be captured."""

    def move_row(self, source: int, target: int) -> None:
        """The request of state row `source` now lives in row `target`."""
