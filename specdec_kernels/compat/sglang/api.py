"""The functions of sgl-kernel's `speculative` and `sampling` modules that speculative decoding uses.

Shapes: bs requests, n nodes per request with the root, S = width of `accept_index`, V vocabulary. A flat node id is
b * n + i. `retrive_index`, `retrive_next_token` and `retrive_next_sibling` are [bs, n] int64: flat ids, and the first
child and next sibling of each node or -1. The verifications write

    predicts            [>= bs * n] int32: at the visited nodes the token committed after each
    accept_index        [bs, S] int32, filled with -1 by the caller: flat ids of the accepted path
    accept_token_num    [bs] int32: accepted drafts

All but the two renormalisations write their results into tensors of the caller.
"""

import torch
from torch import Tensor

from specdec_kernels.checks import (
    expect_at_least,
    expect_at_least_one,
    expect_contiguous,
    expect_dtype,
    expect_fields,
    expect_same_device,
    expect_shape,
    expect_tensors,
)
from specdec_kernels.compat.sglang.reference import copy_links
from specdec_kernels.compat.sglang.types import (
    INTEGERS,
    BuiltTree,
    Outcome,
    Sampling,
    Selected,
    Tree,
    TreeMaskMode,
    by_request,
)
from specdec_kernels.kv_index.reference import owners
from specdec_kernels.launch import dispatch
from specdec_kernels.sampling import top_k_renorm, top_p_renorm
from specdec_kernels.tree import links_from_mask
from specdec_kernels.tree.api import expect_nodes


def build_tree_kernel_efficient(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
    *,
    impl: str = "auto",
) -> None:
    """Links, positions and mask of the trees that EAGLE's re-ranking selected.

    Args:
        parent_list: [bs, topk * (depth - 1) + 1] int64 (or [bs, 0] for depth 1), candidate ids of the rows. A
            longer list is read from its beginning, row after row; a shorter one by its own rows.
        selected_index: [bs, n - 1] int64 candidate ids, in any order; a longer list is read from its beginning.
        verified_seq_len: [bs] int64 committed lengths L.
        tree_mask: written in place. FULL_MASK (0): bool [>= n * sum(L) + bs * n * n], request after request, n
            rows of L + n cells of which the last n are written (the caller fills the prefix). QLEN_ONLY (1):
            bool [bs * n * n]. QLEN_ONLY_BITPACKING (2): integers of at least n bits, [bs * n], bit j of row i.
        positions: [bs * n] int64, written in place: L + depth.
        retrive_index, retrive_next_token, retrive_next_sibling: written in place.
        topk, depth, draft_token_num: branches and steps of the draft, and n, at most 256.

    The parent of an entry may be anywhere in the row. An entry whose parent was not selected is linked to
    no node. Positions and mask follow the path from a node towards the root, which ends where a parent is
    missing, and after `depth` nodes.
    """
    expect_at_least("depth", depth, 1)
    expect_shape("parent_list", parent_list, (None, None))
    expect_nodes("draft_token_num", draft_token_num)
    expect_at_least("topk", topk, 1)
    batch, rows = parent_list.shape[0], min(topk * (depth - 1) + 1, parent_list.shape[1])
    selected_index = by_request("selected_index", selected_index, batch, draft_token_num - 1, torch.int64)
    parent_list = by_request("parent_list", parent_list, batch, rows, torch.int64)
    expect_same_device(verified_seq_len=verified_seq_len, parent_list=parent_list, selected_index=selected_index)
    lengths = _lengths(verified_seq_len, batch)
    mode = TreeMaskMode(tree_mask_mode)
    _check_mask(tree_mask, mode, batch, draft_token_num)
    outputs = _tree_outputs(batch, draft_token_num, positions, retrive_index, retrive_next_token, retrive_next_sibling)
    build = dispatch("build_selected_tree", __package__, impl, lengths, "kernel_build")
    build(Selected(selected_index, parent_list, lengths, tree_mask, outputs, topk, depth, mode))


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
    *,
    impl: str = "auto",
) -> None:
    """Links and positions of the trees that masks describe (ancestors before descendants).

    Args:
        tree_mask: [bs * n * n] bool (any shape with this number of entries), cell (i, j): node i sees node j.
        verified_seq_len: [bs] int64 committed lengths.
        positions, retrive_index, retrive_next_token, retrive_next_sibling: written in place.
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
    copy_links(outputs, links.positions, links.first_child, links.next_sibling)


def verify_tree_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
    *,
    impl: str = "auto",
) -> None:
    """Traverse from the root to the child with the target's token, while there is one.

    Args:
        candidates: [bs, n] int64 tokens of the nodes.
        target_predict: [bs, n] int64, the target's token after each node.
    """
    outcome = Outcome(predicts, accept_index, accept_token_num)
    tree = Tree(candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    _check_walk(outcome, tree)
    expect_tensors({"candidates": candidates}, target_predict=(target_predict, (len(candidates), None), INTEGERS))
    dispatch("verify_tree_greedy", __package__, impl, candidates)(outcome, tree, target_predict)


def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
    *,
    impl: str = "auto",
) -> None:
    """Sampled acceptance of a tree that is a deterministic function of the context.

    Let u be the uniform number of a node. Its children are visited in sibling order while a sum runs over the
    probabilities of their tokens. The first child with u < sum / threshold_acc, or of probability >=
    threshold_single, is accepted, and its own uniform number decides at its own children. If no child is accepted,
    the token after the last accepted node is sampled from the target without the rejected tokens; after a path of
    S - 1 drafts it is sampled from the whole target. It is the first token whose running mass exceeds (final uniform
    number) * (total mass). With both thresholds 1 the output follows the target's distribution exactly; smaller
    thresholds are lossy and give longer paths.

    Args:
        candidates: [bs, n] int64 tokens of the nodes; a token outside the vocabulary is never accepted.
        uniform_samples: [bs, n] float32 in [0, 1); entry i decides among the children of node i.
        uniform_samples_for_final_sampling: [bs] float32 in [0, 1).
        target_probs: [bs, n, V] float32, distribution after each node; negative entries and NaN count as 0.
        draft_probs: [bs, n, V] float32 zeros, changed: the probability of every rejected token at its parent.
        threshold_single, threshold_acc: in (0, 1]; `threshold_acc` below 1e-9 counts as 1e-9.
        deterministic: accepted for the signature; sums always run in one fixed order.
    """
    outcome = Outcome(predicts, accept_index, accept_token_num)
    tree = Tree(candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    _check_walk(outcome, tree)
    call = Sampling(uniform_samples, uniform_samples_for_final_sampling, target_probs, draft_probs)
    expect_fields(call, others=dict(candidates=candidates), B=candidates.shape[0], N=candidates.shape[1])
    expect_at_least("target_probs's vocabulary", target_probs.shape[-1], 1)
    sample = dispatch("tree_speculative_sampling_target_only", __package__, impl, candidates)
    sample(outcome, tree, call, threshold_single, max(threshold_acc, 1e-9))


def segment_packbits(
    x: Tensor, input_indptr: Tensor, output_indptr: Tensor, y: Tensor, batch_size: int, *, impl: str = "auto"
) -> None:
    """Pack the flags of every segment into bytes of its own, first flag in the lowest bit; plain torch.

    Args:
        x: [M] bool (or uint8, not 0 is a set flag).
        input_indptr: [bs + 1] int32, segment b is x[input_indptr[b] : input_indptr[b + 1]].
        output_indptr: [bs + 1] int32, running sum of ceil(segment / 8).
        y: [>= output_indptr[bs]] uint8, written in place; bytes after the last segment stay.
    """
    expect_tensors(
        x=(x, (None,), (torch.bool, torch.uint8)),
        y=(y, (None,), torch.uint8),
        input_indptr=(input_indptr, (batch_size + 1,), torch.int32),
        output_indptr=(output_indptr, (batch_size + 1,), torch.int32),
    )
    segment, column, owned = owners(output_indptr, y.shape[0])
    if x.shape[0] == 0 or input_indptr.shape[0] < 2:
        y.copy_(torch.where(owned, 0, y))
        return
    bit = torch.arange(8, device=x.device)
    flag = (input_indptr[segment] + 8 * column)[:, None] + bit
    inside = owned[:, None] & (flag < input_indptr[segment + 1][:, None]) & (flag < x.shape[0])
    bits = torch.where(inside, (x[flag.clamp(0, x.shape[0] - 1)] != 0).long(), 0)
    y.copy_(torch.where(owned, (bits << bit).sum(1), y.long()).to(torch.uint8))


def top_k_renorm_prob(probs: Tensor, top_k: Tensor | int, *, impl: str = "auto") -> Tensor:
    """Keep the k largest probabilities [rows, V] (ties kept) and renormalise to float32; `top_k` may be [rows]."""
    return top_k_renorm(probs.float(), _per_row(top_k, probs, torch.int32), impl=impl)


def top_p_renorm_prob(probs: Tensor, top_p: Tensor | float, *, impl: str = "auto") -> Tensor:
    """Keep the largest probabilities [rows, V] that sum to p (ties kept), renormalised; `top_p` may be [rows]."""
    return top_p_renorm(probs.float(), _per_row(top_p, probs, torch.float32), impl=impl)


def _per_row(value: Tensor | float, probs: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(dtype)
    return torch.full((probs.shape[0],), value, dtype=dtype, device=probs.device)


def _lengths(verified_seq_len: Tensor, batch: int) -> Tensor:
    expect_shape("verified_seq_len", verified_seq_len, (batch,))
    expect_dtype("verified_seq_len", verified_seq_len, *INTEGERS)
    return verified_seq_len.long().contiguous()


def _check_mask(tree_mask: Tensor, mode: TreeMaskMode, batch: int, nodes: int) -> None:
    expect_contiguous(tree_mask=tree_mask)
    packed = mode is TreeMaskMode.QLEN_ONLY_BITPACKING
    cells = batch * nodes if packed else batch * nodes * nodes
    if tree_mask.numel() < cells:
        raise ValueError(f"tree_mask: expected at least {cells} entries, got {tree_mask.numel()}")
    if not packed:
        expect_dtype("tree_mask", tree_mask, torch.bool)
    elif tree_mask.is_floating_point() or tree_mask.element_size() * 8 < nodes:
        raise ValueError(f"tree_mask: expected integers of at least {nodes} bits, got {tree_mask.dtype}")


def _tree_outputs(batch: int, nodes: int, positions: Tensor, *links: Tensor) -> BuiltTree:
    if positions.numel() != batch * nodes:
        raise ValueError(f"positions: expected {batch * nodes} entries, got {list(positions.shape)}")
    outputs = BuiltTree(positions, *links)
    shapes = dict.fromkeys(BuiltTree._fields, (batch, nodes)) | dict(positions=positions.shape)
    expect_tensors(**{name: (tensor, shapes[name], INTEGERS) for name, tensor in outputs._asdict().items()})
    return outputs


def _check_walk(outcome: Outcome, tree: Tree) -> None:
    expect_fields(tree)
    batch, nodes = tree.candidates.shape
    expect_fields(outcome, others=dict(candidates=tree.candidates), B=batch)
    expect_at_least("predicts's entries", outcome.predicts.shape[0], batch * nodes)
    columns = outcome.accept_index.shape[1]
    expect_at_least_one(**{"candidates's columns": nodes, "accept_index's columns": columns})
