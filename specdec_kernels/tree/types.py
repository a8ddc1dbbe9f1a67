"""Arguments and results of the tree functions, and their limits."""

from typing import Annotated, NamedTuple

from torch import Tensor

WORD_BITS = 64
MAX_NODES = 256
# Parent of a node that is in the tensor but not in the tree. Any value outside [0, node) would do.
UNUSED_PARENT = -2


class TreeLinks(NamedTuple):
    """A batch of draft trees as left-child / right-sibling links, positions and ancestor bits."""

    first_child: Tensor  # [B, N] int32, -1 where there is none
    next_sibling: Tensor  # [B, N] int32, -1 where there is none
    depth: Tensor  # [B, N] int32, 0 at the root
    positions: Tensor  # [B, N] int64, committed length + depth
    mask: Tensor  # [B, N, ceil(N / 64)] int64, bit j of row i: node i sees node j


class Selection(NamedTuple):
    """A batch of draft trees as `build_tree` takes them, and where each node came from."""

    tokens: Tensor  # [B, N] int64, column 0 is the last committed token, 0 in unused nodes
    parents: Tensor  # [B, N] int32, -1 for the root, -2 for nodes outside the tree
    candidates: Tensor  # [B, N] int32, candidate id of the node, -1 for the root and unused nodes
    scores: Tensor  # [B, N] float32, score of the path to the node, 1 for the root and 0 for unused nodes


class MergedTree(NamedTuple):
    """A batch of trees, or the union of two, as `build_tree` takes it."""

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int32, -1 for the root, -2 for nodes outside the tree


class TwoTrees(NamedTuple):
    """Arguments of `merge_trees`."""

    tokens: Annotated[Tensor, "B N int64"]
    parents: Annotated[Tensor, "B N int32"]
    other_tokens: Annotated[Tensor, "B M int64"]
    other_parents: Annotated[Tensor, "B M int32"]


class Candidates(NamedTuple):
    """Everything that a drafter has offered so far, filled level by level; M is all that it will offer."""

    path_scores: Annotated[Tensor, "B M float32"]
    tokens: Annotated[Tensor, "B M int64"]
    parents: Annotated[Tensor, "B M int32"]  # candidate id of the parent, -1 for the root


class Frontier(NamedTuple):
    """The candidates of one level that are run next, the best first."""

    scores: Annotated[Tensor, "B P float32"]  # falling
    candidates: Annotated[Tensor, "B P int32"]  # candidate ids
    tokens: Tensor  # [B, T] int64
    parents: Tensor  # [B, T] int64, column of the parent in the frontier before; 0 under the root
    mask: Annotated[Tensor, "B P * int64"]  # bit j: slot j is seen


class DraftTopk(NamedTuple):
    """The largest entries of each row of logits."""

    probs: Tensor  # [R, k] float32, falling
    tokens: Tensor  # [R, k] int64


class ChildSampling(NamedTuple):
    """The checked arguments of `sample_children`, which describes them."""

    tokens: Annotated[Tensor, "B N int64"]
    probs: Annotated[Tensor, "B R V float32"]
    children: Annotated[Tensor, "P K int32"]
    rows: Annotated[Tensor, "P int32"]
    top_tokens: Annotated[Tensor, "B R C int64"]
    temperature: Annotated[Tensor, "B float32"]
    seeds: Annotated[Tensor | None, "B int64"]
    positions: Annotated[Tensor | None, "B int64"]
    uniforms: Annotated[Tensor | None, "B N float64"]


class Expansion(NamedTuple):
    """The checked arguments of `expand_tree`, which describes them."""

    frontier: Frontier | None
    probs: Annotated[Tensor, "B P C float32"]
    tokens: Annotated[Tensor, "B P C int64"]
    candidates: Candidates
    first: int
    width: int
    mask: Annotated[Tensor | None, "B T * int64"]
    slot: int
    root_is_stored: bool
    vocabulary: Annotated[Tensor | None, "* int64"]


def mask_words(num_nodes: int) -> int:
    """Number of 64-bit words that hold one mask row."""
    return (num_nodes + WORD_BITS - 1) // WORD_BITS
