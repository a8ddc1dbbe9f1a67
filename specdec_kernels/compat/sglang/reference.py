"""Definition of the functions that have kernels of their own, in plain torch."""

from __future__ import annotations

import torch

from specdec_kernels.compat.sglang.index.reference import mask_cells, parents_from_candidates, row_offsets
from specdec_kernels.compat.sglang.types import TreeMaskMode
from specdec_kernels.tree.reference import build_tree
from specdec_kernels.tree.types import WORD_BITS, TreeLinks


def build_selected_tree(
    selected: torch.Tensor,
    parent_list: torch.Tensor,
    lengths: torch.Tensor,
    tree_mask: torch.Tensor,
    outputs: tuple[torch.Tensor, ...],
    topk: int,
    depth: int,
    mode: TreeMaskMode,
) -> None:
    """Put links, positions and mask of the trees of `selected` candidates [B, N - 1] where SGLang wants them.

    `outputs`: positions, flat ids, first children and next siblings; see `build_tree_kernel_efficient`.
    """
    links = build_tree(parents_from_candidates(selected, parent_list, topk), lengths, depth)
    deliver_links(links, outputs)
    _deliver_mask(links.mask, lengths, row_offsets(lengths), tree_mask, mode)


def deliver_links(links: TreeLinks, outputs: tuple[torch.Tensor, ...]) -> None:
    """Put links and positions where SGLang wants them, in its integer types."""
    batch, nodes = links.first_child.shape
    out_positions, out_index, out_child, out_sibling = outputs
    out_positions.view(batch, nodes).copy_(links.positions)
    out_index.copy_(torch.arange(batch * nodes, device=out_index.device).view(batch, nodes))
    out_child.copy_(links.first_child)
    out_sibling.copy_(links.next_sibling)


def _deliver_mask(
    mask: torch.Tensor, lengths: torch.Tensor, offsets: torch.Tensor, tree_mask: torch.Tensor, mode: TreeMaskMode
) -> None:
    """Put the mask [B, N, words] where SGLang wants it; `offsets` are the sums of the lengths."""
    batch, nodes = mask.shape[:2]
    flat = tree_mask.view(-1)
    if mode is TreeMaskMode.QLEN_ONLY_BITPACKING:
        row = mask[:, :, 0].reshape(-1)
        # The lowest bits, the last of them as the sign: not every conversion on a device cuts the others off.
        bits = tree_mask.element_size() * 8
        signed = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]
        flat.view(signed)[: batch * nodes] = (row << WORD_BITS - bits >> WORD_BITS - bits).to(signed)
        return
    place = torch.arange(batch * nodes * nodes, device=lengths.device)
    if mode is TreeMaskMode.FULL_MASK:
        request, cell = place // (nodes * nodes), place % (nodes * nodes)
        row, column = cell // nodes, cell % nodes
        length = lengths.clamp(min=0)[request]
        place = offsets[request].long() * nodes + request * nodes * nodes
        place = place + row * (length + nodes) + length + column
    flat[place] = mask_cells(mask).flatten()


def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """See `specdec_kernels.compat.sglang.verify_tree_greedy`."""
    walk = _Walk(accept_index, retrive_index, next_token, next_sibling)
    flat_target = target_predict.reshape(-1)
    for _ in range(candidates.shape[1] - 1):
        token = _at(candidates, walk.child)
        walk.step(_checked(flat_target, walk.last) == token, token, predicts)
    _put(predicts, walk.last, _checked(flat_target, walk.last), walk.last == walk.last)
    accept_token_num.copy_(walk.accepted)


def tree_speculative_sampling_target_only(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    uniforms: torch.Tensor,
    final_uniforms: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float,
    threshold_acc: float,
) -> None:
    """See `specdec_kernels.compat.sglang.tree_speculative_sampling_target_only`."""
    batch, nodes, vocab = target_probs.shape
    if batch == 0:
        return
    request = torch.arange(batch, device=candidates.device)
    walk = _Walk(accept_index, retrive_index, next_token, next_sibling)
    mass = uniforms.new_zeros(batch)
    for _ in range(nodes - 1):
        token = _at(candidates, walk.child)
        known = walk.active & (token >= 0) & (token < vocab)
        place = (request, walk.node, token.clamp(0, vocab - 1))
        probability = torch.where(known, _positive(target_probs[place]), 0)
        before = torch.where(known, draft_probs[place], 0)
        added = torch.where(before > 0, 0, probability)
        mass = mass + added
        uniform = uniforms[request, walk.node]
        hit = known & ((uniform < mass / threshold_acc) | (added >= threshold_single))
        miss = known & ~hit & (before <= 0)
        # An entry that rejects nothing puts back what is there; every request has its own rows.
        draft_probs[place] = torch.where(miss, probability, draft_probs[place])
        walk.step(hit, token, predicts)
        mass = torch.where(hit, 0, mass)
    target = _positive(target_probs[request, walk.node])
    full = walk.accepted == accept_index.shape[1] - 1
    rejected = torch.where(full[:, None], 0, _positive(draft_probs[request, walk.node]))
    _put(predicts, walk.last, _draw(target, rejected, final_uniforms), walk.last == walk.last)
    accept_token_num.copy_(walk.accepted)


def _draw(target: torch.Tensor, rejected: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """First token whose running residual exceeds uniform * total, see the public function."""
    residual = (target - rejected).clamp(min=0)
    running = residual.cumsum(1)
    goal = uniform * running[:, -1]
    vocab = target.shape[1]
    token = torch.arange(vocab, device=target.device)
    first = torch.where((running > goal[:, None]) & (residual > 0), token, vocab).amin(1)
    last = torch.where(residual > 0, token, -1).amax(1)
    drawn = torch.where(first < vocab, first, last)
    return torch.where(drawn >= 0, drawn, target.argmax(1))


def segment_packbits(x: torch.Tensor, input_indptr: torch.Tensor, output_indptr: torch.Tensor, y: torch.Tensor) -> None:
    """See `specdec_kernels.compat.sglang.segment_packbits`."""
    place = torch.arange(y.shape[0], device=x.device)
    segment = torch.searchsorted(output_indptr[1:].contiguous(), place.int(), right=True)
    owned = segment < input_indptr.shape[0] - 1
    if x.shape[0] == 0 or input_indptr.shape[0] < 2:
        y.copy_(torch.where(owned, 0, y))
        return
    segment = torch.where(owned, segment, 0)
    bit = torch.arange(8, device=x.device)
    flag = (input_indptr[segment] + 8 * (place - output_indptr[segment]))[:, None] + bit
    inside = owned[:, None] & (flag < input_indptr[segment + 1][:, None]) & (flag < x.shape[0])
    bits = torch.where(inside, (x[flag.clamp(0, x.shape[0] - 1)] != 0).long(), 0)
    y.copy_(torch.where(owned, (bits << bit).sum(1), y.long()).to(torch.uint8))


class _Walk:
    """A walk of all requests at once down their trees, one visited node per step."""

    def __init__(
        self,
        accept_index: torch.Tensor,
        retrive_index: torch.Tensor,
        next_token: torch.Tensor,
        next_sibling: torch.Tensor,
    ) -> None:
        self._accept_index, self._index = accept_index, retrive_index
        self._next_token, self._next_sibling = next_token, next_sibling
        batch, self._nodes = next_token.shape
        self.node = torch.zeros(batch, dtype=torch.int64, device=next_token.device)
        self.accepted = torch.zeros_like(self.node)
        self.last = retrive_index[:, 0].long()
        self.child = next_token[:, 0].long()
        accept_index[:, 0] = self.last

    @property
    def active(self) -> torch.Tensor:
        deeper = self.accepted < self._accept_index.shape[1] - 1
        return deeper & (self.child >= 0) & (self.child < self._nodes)

    def step(self, hit: torch.Tensor, token: torch.Tensor, predicts: torch.Tensor) -> None:
        """Accept the visited children of `hit`, pass on to the sibling elsewhere."""
        active, child = self.active, self.child
        hit = active & hit
        _put(predicts, self.last, token, hit)
        self.accepted = self.accepted + hit
        self.node = torch.where(hit, child, self.node)
        self.last = torch.where(hit, _at(self._index, child), self.last)
        column = self.accepted[:, None]
        kept = self._accept_index.gather(1, column)
        self._accept_index.scatter_(1, column, torch.where(hit[:, None], self.last[:, None].to(kept.dtype), kept))
        onward = torch.where(hit, _at(self._next_token, child), _at(self._next_sibling, child))
        self.child = torch.where(active, onward, self.child)


def _positive(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, 0)


def _at(per_node: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
    """[bs] entries of each request's node; any entry for a node that is not there."""
    return per_node.gather(1, node.clamp(0, per_node.shape[1] - 1)[:, None])[:, 0].long()


def _checked(flat: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """flat[place], -1 outside."""
    inside = (place >= 0) & (place < flat.shape[0])
    return torch.where(inside, flat[place.clamp(0, flat.shape[0] - 1)].long(), -1)


def _put(flat: torch.Tensor, place: torch.Tensor, value: torch.Tensor, live: torch.Tensor) -> None:
    """flat[place] = value where live and inside; one place more takes the rest."""
    target = torch.where(live & (place >= 0) & (place < flat.shape[0]), place, flat.shape[0])
    longer = torch.cat([flat, flat.new_zeros(1)])
    flat.copy_(longer.scatter(0, target, value.to(flat.dtype))[:-1])
