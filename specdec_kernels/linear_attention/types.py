"""Arguments and results of linear attention with the gated delta rule.

R rows (tokens), H key heads of size dk, HV value heads of size dv, C = 2 H dk + HV dv channels (queries, keys, values),
T taps of the convolution, S state slots. Value head h reads key head h // (HV / H).
"""

from typing import Annotated, NamedTuple

from torch import Tensor

CHUNK = 64
"""Rows of a chunk, and most nodes of a tree that is solved at once."""
LEAST_DECAY = 1e-37
"""Smaller decays count as this in chunks and trees, which add their logarithms."""


class DeltaWeights(NamedTuple):
    """Weights of one layer besides its projections and norm."""

    conv: Tensor  # [C, T]: the last tap multiplies the row itself
    a_log: Tensor  # [HV] float32
    dt_bias: Tensor  # [HV] float32


class DeltaState(NamedTuple):
    """The state of each slot: of one layer, or of L layers with a leading dimension L."""

    ssm: Tensor  # [S, HV, dk, dv] float32
    conv: Tensor  # [S, T - 1, C]: the last inputs of the convolution, the latest last


class DeltaInputs(NamedTuple):
    """What the recurrence reads of each row: of one layer, or of L layers with a leading dimension L."""

    mixed: Tensor  # [R, C] float32: after convolution and SiLU; queries and keys normed, queries scaled
    decay: Tensor  # [R, HV] float32: exp(g), of the state before the row
    beta: Tensor  # [R, HV] float32: share of the difference that is written
    raw: Tensor  # [R, C]: inputs of the convolution


class RowLinks(NamedTuple):
    """What precedes each row."""

    parents: Annotated[Tensor, "R int32"]  # row of the token before, -1 where the state of the slot precedes
    slots: Annotated[Tensor, "R int64"]  # state slot, -1 for zeros


class Paths(NamedTuple):
    """W sequences of rows through which states pass. Path w has the rows `order[first[w] + i]`, i < `counts[w]`."""

    order: Annotated[Tensor, "* int32"]  # row numbers
    first: Annotated[Tensor, "W int32"]
    counts: Annotated[Tensor, "W int32"]
    starts: Annotated[Tensor, "W int64"]  # slot whose state the path starts from, -1 for zeros
    ends: Annotated[Tensor | None, "W int64"] = None  # slot of the state after the path, -1 for none; None: all none
    owners: Annotated[Tensor | None, "R int32"] = None  # the path that writes the output of a row, -1 for none

    @property
    def complete(self) -> bool:
        """Whether every row has an owner: those of chains and trees, whose paths end in no slot."""
        return self.ends is None


class Trees(NamedTuple):
    """B trees of N nodes, row b N + i for node i of request b. Parents have lower numbers than their children."""

    mask: Annotated[Tensor, "B N 1 int64"]  # bit j of row i: node i sees node j, as in `TreeLinks`
    slots: Annotated[Tensor, "B int64"]  # slot whose state precedes the roots, -1 for zeros


class Chunks(NamedTuple):
    """The whole chunks of P segments of prompts, through which states pass before the other rows of the segments. Row r
    of a call is in chunk r // CHUNK."""

    first: Annotated[Tensor, "P int32"]  # number of a segment's first chunk
    counts: Annotated[Tensor, "P int32"]
    starts: Annotated[Tensor, "P int64"]  # slot whose state the segment starts from, -1 for zeros
    ends: Annotated[Tensor, "P int64"]  # slot that takes the state after the chunks, where there are any
    whole: Annotated[Tensor, "R/64 int32"]  # 1 where all rows are tokens of one segment
