"""The functions of sgl-kernel's `speculative` and `sampling` modules that speculative decoding uses.

Shapes: bs requests, n nodes per request with the root, S = width of `accept_index`, V vocabulary. A flat node id is
b * n + i. All but the two renormalisations write their results into tensors of the caller. All raise ValueError for a
wrong shape, dtype, stride or device.
"""

from __future__ import annotations

from typing import Any

import torch

from specdec_kernels.checks import expect_at_least, expect_contiguous, expect_dtype, expect_same_device, expect_shape
from specdec_kernels.compat.sglang.types import TreeMaskMode
from specdec_kernels.launch import dispatch
from specdec_kernels.sampling import top_k_renorm, top_p_renorm
from specdec_kernels.tree import links_from_mask
from specdec_kernels.tree.api import expect_nodes

_INTEGERS = (torch.int32, torch.int64)


def build_tree_kernel_efficient(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
    *,
    impl: str = "auto",
) -> None:
    """Links, positions and mask of the trees that EAGLE's re-ranking selected.

    Args:
        parent_list: [bs, topk * (depth - 1) + 1] int64 (or [bs, 0] for depth 1), candidate ids of the rows. Of a
            longer one the first bs * (topk * (depth - 1) + 1) entries are read, row after row; of a shorter one the
            rows as they are.
        selected_index: [bs, n - 1] int64 candidate ids, in any order. Of a longer one the first bs * (n - 1) entries
            are read, row after row.
        verified_seq_len: [bs] int64 committed lengths L.
        tree_mask: written in place. FULL_MASK (0): bool [>= n * sum(L) + bs * n * n], request after request, n
            rows of L + n cells of which the last n are written (the caller fills the prefix). QLEN_ONLY (1):
            bool [bs * n * n]. QLEN_ONLY_BITPACKING (2): integers of at least n bits, [bs * n], bit j of row i.
        positions: [bs * n] int64, written in place: L + depth.
        retrive_index, retrive_next_token, retrive_next_sibling: [bs, n] int64, written in place: flat ids, and
            the first child and next sibling of each node or -1.
        topk: branches of the draft.
        depth: draft steps, at least 1. No walk to the root is longer.
        draft_token_num: n, at most 256.
        tree_mask_mode: see `tree_mask`.

    The parent of an entry is found wherever it stands in the row. An entry whose parent was not selected is linked to
    no node. Positions and mask follow the walk from a node towards the root: it counts the nodes that it meets, ends
    where a parent is missing, and after `depth` nodes. This is what SGLang's CPU and Triton builders do; its CUDA
    builder agrees on trees whose parents are all selected, and leaves the tensors or does not end on others.
    """
    expect_at_least("depth", depth, 1)
    expect_shape("parent_list", parent_list, (None, None))
    batch, rows = parent_list.shape[0], topk * (depth - 1) + 1
    selected_index = _first_rows("selected_index", selected_index, batch, draft_token_num - 1)
    parent_list = _first_rows("parent_list", parent_list, batch, min(rows, parent_list.shape[1]))
    expect_nodes("draft_token_num", draft_token_num)
    expect_at_least("topk", topk, 1)
    for name, tensor in dict(parent_list=parent_list, selected_index=selected_index).items():
        expect_dtype(name, tensor, torch.int64)
        expect_same_device(verified_seq_len=verified_seq_len, **{name: tensor})
    lengths = _lengths(verified_seq_len, batch)
    mode = TreeMaskMode(tree_mask_mode)
    _check_mask(tree_mask, mode, batch, draft_token_num)
    outputs = _tree_outputs(batch, draft_token_num, positions, retrive_index, retrive_next_token, retrive_next_sibling)
    build = dispatch("build_selected_tree", __package__, impl, lengths, "kernel_build")
    build(selected_index.contiguous(), parent_list.contiguous(), lengths, tree_mask, outputs, topk, depth, mode)


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    *,
    impl: str = "auto",
) -> None:
    """Links and positions of the trees that masks describe (ancestors before descendants).

    Args:
        tree_mask: [bs * n * n] bool (any shape of so many entries), cell (i, j): node i sees node j.
        verified_seq_len: [bs] int64 committed lengths.
        positions, retrive_index, retrive_next_token, retrive_next_sibling: as in `build_tree_kernel_efficient`.
        batch_size, draft_token_num: bs and n.
    """
    cells = batch_size * draft_token_num * draft_token_num
    if tree_mask.numel() != cells or tree_mask.dtype != torch.bool:
        raise ValueError(f"tree_mask: expected {cells} bool cells, got {tree_mask.numel()} of {tree_mask.dtype}")
    lengths = _lengths(verified_seq_len, batch_size)
    mask = tree_mask.contiguous().view(batch_size, draft_token_num, draft_token_num)
    links = links_from_mask(mask, lengths, impl=impl)
    outputs = _tree_outputs(
        batch_size, draft_token_num, positions, retrive_index, retrive_next_token, retrive_next_sibling
    )
    dispatch("deliver_links", __package__, impl, lengths)(links, outputs)


def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    *,
    impl: str = "auto",
) -> None:
    """Walk from the root to the child that carries the target's token, while there is one.

    Args:
        predicts: [>= bs * n] int32, written in place at the visited nodes: the token committed after each.
        accept_index: [bs, S] int32, filled with -1 by the caller; written in place: flat ids of the path.
        accept_token_num: [bs] int32, written in place: accepted drafts.
        candidates: [bs, n] int64 tokens of the nodes.
        retrive_index, retrive_next_token, retrive_next_sibling: [bs, n] int64.
        target_predict: [bs, n] int64, the target's token after each node.
    """
    tree = dict(retrive_index=retrive_index, next_token=retrive_next_token, next_sibling=retrive_next_sibling)
    _check_walk(predicts, accept_index, accept_token_num, candidates, **tree)
    expect_shape("target_predict", target_predict, (candidates.shape[0], None))
    expect_dtype("target_predict", target_predict, *_INTEGERS)
    expect_contiguous(target_predict=target_predict)
    expect_same_device(candidates=candidates, target_predict=target_predict)
    arguments = (predicts, accept_index, accept_token_num, candidates, *tree.values(), target_predict)
    dispatch("verify_tree_greedy", __package__, impl, candidates)(*arguments)


def tree_speculative_sampling_target_only(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
    *,
    impl: str = "auto",
) -> None:
    """Sampled acceptance of a tree that is a deterministic function of the context.

    Let u be the uniform number of a node. Its children are visited in sibling order while a sum runs over the
    probabilities of their tokens. The first child with u < sum / threshold_acc, or of probability >=
    threshold_single, is accepted, and its own uniform number decides at its own children. Where no child is accepted,
    the token after the last accepted node is drawn from the target without the rejected tokens; after a path of S - 1
    drafts it is drawn from the whole target. It is the first token whose running mass exceeds (final uniform number)
    * (total mass). With both thresholds 1 the emitted tokens follow the target's distribution exactly; smaller
    thresholds give longer paths at the price of that.

    Args:
        predicts: [>= bs * n] int32, written in place at the visited nodes: the token committed after each.
        accept_index: [bs, S] int32, filled with -1 by the caller; written in place: flat ids of the path.
        accept_token_num: [bs] int32, written in place: accepted drafts.
        candidates: [bs, n] int64 tokens of the nodes; a token outside the vocabulary is never accepted.
        retrive_index, retrive_next_token, retrive_next_sibling: [bs, n] int64.
        uniform_samples: [bs, n] float32 in [0, 1); entry i decides among the children of node i.
        uniform_samples_for_final_sampling: [bs] float32 in [0, 1).
        target_probs: [bs, n, V] float32, distribution after each node; negative entries and NaN count as 0.
        draft_probs: [bs, n, V] float32 zeros, changed: the probability of every rejected token at its parent.
        threshold_single, threshold_acc: in (0, 1]; `threshold_acc` below 1e-9 counts as 1e-9.
        deterministic: accepted for the signature; sums always run in one fixed order.
    """
    tree = dict(retrive_index=retrive_index, next_token=retrive_next_token, next_sibling=retrive_next_sibling)
    _check_walk(predicts, accept_index, accept_token_num, candidates, **tree)
    batch, nodes = candidates.shape
    uniforms, final = uniform_samples, uniform_samples_for_final_sampling
    distributions = dict(target_probs=target_probs, draft_probs=draft_probs)
    for name, probs in distributions.items():
        expect_shape(name, probs, (batch, nodes, target_probs.shape[-1]))
    expect_shape("uniform_samples", uniforms, (batch, nodes))
    expect_shape("uniform_samples_for_final_sampling", final, (batch,))
    for name, tensor in dict(distributions, uniform_samples=uniforms, uniform_samples_for_final_sampling=final).items():
        expect_dtype(name, tensor, torch.float32)
        expect_contiguous(**{name: tensor})
        expect_same_device(candidates=candidates, **{name: tensor})
    if target_probs.shape[-1] < 1:
        raise ValueError(f"target_probs: expected a vocabulary, got shape {list(target_probs.shape)}")
    arguments: tuple[Any, ...] = (
        predicts, accept_index, accept_token_num, candidates, *tree.values(), uniforms, final, target_probs,
        draft_probs, threshold_single, max(threshold_acc, 1e-9),
    )  # fmt: skip
    dispatch("tree_speculative_sampling_target_only", __package__, impl, candidates)(*arguments)


def segment_packbits(
    x: torch.Tensor,
    input_indptr: torch.Tensor,
    output_indptr: torch.Tensor,
    y: torch.Tensor,
    batch_size: int,
    *,
    impl: str = "auto",
) -> None:
    """Pack the flags of every segment into bytes, first flag in the lowest bit, each segment from a fresh byte.

    Args:
        x: [M] bool (or uint8, not 0 is a set flag).
        input_indptr: [bs + 1] int32, segment b is x[input_indptr[b] : input_indptr[b + 1]].
        output_indptr: [bs + 1] int32, running sum of ceil(segment / 8).
        y: [>= output_indptr[bs]] uint8, written in place; bytes behind the last segment stay.
        batch_size: bs.
    """
    expect_shape("x", x, (None,))
    expect_dtype("x", x, torch.bool, torch.uint8)
    expect_dtype("y", y, torch.uint8)
    expect_shape("y", y, (None,))
    for name, indptr in (("input_indptr", input_indptr), ("output_indptr", output_indptr)):
        expect_shape(name, indptr, (batch_size + 1,))
        expect_dtype(name, indptr, torch.int32)
    expect_contiguous(x=x, y=y, input_indptr=input_indptr, output_indptr=output_indptr)
    expect_same_device(x=x, y=y, input_indptr=input_indptr, output_indptr=output_indptr)
    dispatch("segment_packbits", __package__, impl, x)(x, input_indptr, output_indptr, y)


def top_k_renorm_prob(probs: torch.Tensor, top_k: torch.Tensor | int, *, impl: str = "auto") -> torch.Tensor:
    """Keep probabilities [rows, V] that are at least the k-th largest (ties kept) and renormalise to float32.

    `top_k` is one for all rows, or [rows].
    """
    return top_k_renorm(probs.float(), _per_row(top_k, probs, torch.int32), impl=impl)


def top_p_renorm_prob(probs: torch.Tensor, top_p: torch.Tensor | float, *, impl: str = "auto") -> torch.Tensor:
    """Keep the largest probabilities [rows, V] whose sum reaches p (ties kept) and renormalise to float32.

    `top_p` is one for all rows, or [rows].
    """
    return top_p_renorm(probs.float(), _per_row(top_p, probs, torch.float32), impl=impl)


def _per_row(value: torch.Tensor | float, probs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.to(dtype)
    return torch.full((probs.shape[0],), value, dtype=dtype, device=probs.device)


def _first_rows(name: str, tensor: torch.Tensor, batch: int, width: int) -> torch.Tensor:
    """The first `batch * width` entries of `tensor` as [batch, width]."""
    if tensor.numel() < batch * width:
        raise ValueError(f"{name}: expected at least {batch} x {width} entries, got shape {list(tensor.shape)}")
    return tensor.reshape(-1)[: batch * width].view(batch, width)


def _lengths(verified_seq_len: torch.Tensor, batch: int) -> torch.Tensor:
    expect_shape("verified_seq_len", verified_seq_len, (batch,))
    expect_dtype("verified_seq_len", verified_seq_len, *_INTEGERS)
    return verified_seq_len.long().contiguous()


def _check_mask(tree_mask: torch.Tensor, mode: TreeMaskMode, batch: int, nodes: int) -> None:
    expect_contiguous(tree_mask=tree_mask)
    packed = mode is TreeMaskMode.QLEN_ONLY_BITPACKING
    cells = batch * nodes if packed else batch * nodes * nodes
    if tree_mask.numel() < cells:
        raise ValueError(f"tree_mask: expected at least {cells} entries, got {tree_mask.numel()}")
    if not packed:
        expect_dtype("tree_mask", tree_mask, torch.bool)
    elif tree_mask.is_floating_point() or tree_mask.element_size() * 8 < nodes:
        raise ValueError(f"tree_mask: expected integers of at least {nodes} bits, got {tree_mask.dtype}")


def _tree_outputs(batch: int, nodes: int, positions: torch.Tensor, *links: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Positions, flat ids, first children and siblings, checked."""
    if positions.numel() != batch * nodes:
        raise ValueError(f"positions: expected {batch * nodes} entries, got {list(positions.shape)}")
    expect_dtype("positions", positions, *_INTEGERS)
    expect_contiguous(positions=positions)
    for name, tensor in zip(("retrive_index", "retrive_next_token", "retrive_next_sibling"), links, strict=True):
        expect_shape(name, tensor, (batch, nodes))
        expect_dtype(name, tensor, *_INTEGERS)
        expect_contiguous(**{name: tensor})
        expect_same_device(positions=positions, **{name: tensor})
    return (positions, *links)


def _check_walk(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    **tree: torch.Tensor,
) -> None:
    expect_shape("candidates", candidates, (None, None))
    batch, nodes = candidates.shape
    expect_shape("accept_index", accept_index, (batch, None))
    expect_shape("accept_token_num", accept_token_num, (batch,))
    for name, tensor in tree.items():
        expect_shape(name, tensor, (batch, nodes))
    if predicts.dim() != 1 or predicts.shape[0] < batch * nodes:
        raise ValueError(f"predicts: expected shape [>= {batch * nodes}], got {list(predicts.shape)}")
    if accept_index.shape[1] < 1 or nodes < 1:
        raise ValueError(
            f"accept_index and candidates: expected at least one column, got {accept_index.shape[1]} and {nodes}"
        )
    written = dict(predicts=predicts, accept_index=accept_index, accept_token_num=accept_token_num)
    tensors = dict(written, candidates=candidates, **tree)
    for name, tensor in tensors.items():
        expect_dtype(name, tensor, *_INTEGERS)
    expect_contiguous(**tensors)
    expect_same_device(**tensors)
