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
    """Learn from one step how much each size writes, and choose the size with the most tokens per time, in place.

    Nodes rank by falling confidence, among equals by number. A step of `sizes[s]` nodes that writes t tokens in a row
    would have written m_i of them with size i <= s: the accepted drafts of rank below `sizes[i]`, and one more. Where
    text is easy, its tokens are drafted as well one step later. So size i is taken to write the t tokens in t / m_i
    steps, and not to lose what it leaves out. Where nodes rank by number, as in a chain, whose first drafts are the
    same in every size, steps of all sizes often end at the same draft that is wrong. A quarter of them are taken to do
    so: they count as the next whole number, the others as t / m_i. A tree behind a token that was unlikely holds better
    drafts than the tree before it, so nine tenths of the extra steps of a smaller tree are counted, t / m_i - 1, but
    all of those without a draft. With u_i = sum of these steps over the R active rows and w = 2^(-1 / h) for
    h = 16 + 112 / R steps, every size 1 to s is updated, and its tokens per step follow from those of the sizes before:

        smaller_i = w smaller_i + u_(i - 1)     own_i = w own_i + u_i
        tokens_i = min(product of smaller_j / own_j for j = 1 to i, sizes[i])

    Both sums are of the same steps, so the ratio of two sizes varies little. Of sizes above s such a step says nothing,
    but where drafts are accepted more often than before, larger sizes gain more as well. So with the gain
    g = smaller_s / own_s - 1, before and after this step, smaller_i - own_i of every size i above s is multiplied by
    (g_after + 0.05) / (g_before + 0.05). Both of their sums are multiplied by w too, while own_i stays above 16, so
    that a few steps of such a size outweigh what is long past. Where the last choice is not to draft, the step is a
    trial: larger sizes keep their ratio, and h = 16 / R at most, so that few rows decide whether drafting is taken up
    again. The sums begin with 4 steps of a chain whose drafts are accepted with probability 0.85.

    The best size is the one with the largest tokens_i / step_ms[i], of equal ones the smallest. The last choice stays
    while the best one promises less than 1 % more, or less than 2 % where it is a larger one. Without an active row
    nothing changes.

    Args:
        state: `evidence` and `choice` are written in place. All tensors are contiguous.
        confidence: [B, N] float32, probability of the path from node 0 to each node in the drafter's eyes, 0 for unused
            nodes; or None, where nodes rank by number.
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
