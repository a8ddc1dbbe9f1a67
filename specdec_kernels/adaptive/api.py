"""Public function of the family: arguments are checked here, once for both implementations."""

from __future__ import annotations

import torch

from specdec_kernels.adaptive.types import EVIDENCE, MAX_NODES, SizeState
from specdec_kernels.checks import expect_tensors
from specdec_kernels.launch import dispatch


def choose_size(
    state: SizeState,
    confidence: torch.Tensor | None,
    nodes: torch.Tensor,
    num_accepted: torch.Tensor,
    active: torch.Tensor,
    step_ms: torch.Tensor,
    size: int,
    num_nodes: int,
    *,
    impl: str = "auto",
) -> None:
    """Learn from one step how much each size gains, and choose the size with the most tokens per time, in place.

    A step of `sizes[i]` nodes has drafted the bands 0 to i - 1. Nodes rank by falling confidence, among equals by
    number. With confidence, band j is expected to add e_j = sum of the confidence of its nodes, and a_j of its nodes
    are accepted, both summed over the R active rows. With the weights w = 2^(-1 / h) and v = 2^(-1 / (32 h)) for
    h = 16 + 112 / R steps, every drafted band is updated:

        signal = w signal + e_j     accepted = v accepted + a_j     before = v before + a_(j - 1)
        rows = w rows + R           expected = v expected + e_j
        gain_j = signal / rows * (accepted + 1) / (expected + 1)

    So the drafter's expectation, which varies little, says how well it goes now, and what was accepted over a longer
    time corrects it. Without confidence the signal is a_j and is not corrected. A band that was not drafted is taken to
    gain gain_(j - 1) * (accepted + 1) / (before + 1). No band gains more than it has nodes. Index i then has the rate

        (1 + gain_0 + ... + gain_(i - 1)) / step_ms[i]

    and the largest is the best; of equal ones the smallest index. The choice is the best index, or the last one whose
    step takes at most 1.02 times as long, where the best one drafts: what a larger step tells is worth that. Without an
    active row nothing changes.

    Args:
        state: `evidence` and `choice` are written in place. All tensors are contiguous.
        confidence: [B, N] float32, probability of the path from node 0 to each node in the drafter's eyes, 0 for unused
            nodes; or None.
        nodes: [B, D + 1] int32 and
        num_accepted: [B] int32, as in `Accepted`.
        active: [B] int32: 1, or 0 for a padding row.
        step_ms: [S + 1] float32, time of a step of each size, above 0; drafting included.
        size: i, 1 to S: the index of the size of this step.
        num_nodes: N, nodes of a tree, at least `sizes[i]`, which ranks beyond are not counted.
        impl: `auto`, `triton` or `reference`.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, or sizes out of range.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_tensors(nodes=(nodes, (None, None), torch.int32))
    batch, bands = nodes.shape[0], state.evidence.shape[0]
    expect_tensors(
        {"nodes": nodes},
        sizes=(state.sizes, (bands + 1,), torch.int32),
        evidence=(state.evidence, (bands, len(EVIDENCE)), torch.float32),
        choice=(state.choice, (2,), torch.int32),
        confidence=(confidence, (batch, num_nodes), torch.float32),
        num_accepted=(num_accepted, (batch,), torch.int32),
        active=(active, (batch,), torch.int32),
        step_ms=(step_ms, (bands + 1,), torch.float32),
    )
    for name, value, most in (("size", size, bands), ("num_nodes", num_nodes, MAX_NODES)):
        if not 1 <= value <= most:
            raise ValueError(f"{name}: expected 1 to {most}, got {value}")
    choose = dispatch("choose_size", __package__, impl, nodes)
    choose(state, confidence, nodes, num_accepted, active, step_ms, size, num_nodes)
