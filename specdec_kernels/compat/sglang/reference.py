"""Definition of the functions that have kernels of their own, in plain torch."""

import torch
from torch import Tensor

from specdec_kernels.compat.sglang.types import (
    BuiltTree,
    Outcome,
    Sampling,
    Selected,
    Sequences,
    Spans,
    Tree,
    TreeMaskMode,
)
from specdec_kernels.kv_index.reference import offsets_of, owners
from specdec_kernels.tree.reference import links_of


def build_selected_tree(call: Selected) -> None:
    parent = _parents(call.selected, call.parent_list, call.topk)
    batch, nodes = parent.shape
    node = torch.arange(nodes, device=parent.device)
    sees = torch.eye(nodes, dtype=torch.bool, device=parent.device).repeat(batch, 1, 1)
    sees[:, :, 0] = True
    depth = (node > 0).long().repeat(batch, 1)
    ancestor = parent
    for _ in range(call.depth - 1):
        climbs = ancestor >= 1
        depth += climbs
        sees |= climbs[:, :, None] & (ancestor[:, :, None] == node)
        ancestor = torch.where(climbs, parent.gather(1, ancestor.clamp(min=0)), -1)
    copy_links(call.outputs, call.lengths[:, None] + depth, *links_of(parent))
    _copy_mask(sees, call.lengths, call.tree_mask, call.mode)


def _parents(selected: Tensor, parent_list: Tensor, topk: int) -> Tensor:
    """[B, N] parent nodes of selected candidates. Candidate id f lies in row r = f // topk of the history. The parent
    of row 0 (and of a negative id) is the root, that of row r > 0 the first selected candidate with id
    `parent_list[b, r]`, -1 where r lies beyond the list or the parent was not selected."""
    batch, drafts = selected.shape
    rows = parent_list.shape[1]
    row = selected.div(topk, rounding_mode="floor")
    readable = (row > 0) & (row < rows)
    padded = torch.cat([parent_list, parent_list.new_full((batch, 1), -1)], 1)
    wanted = padded.gather(1, torch.where(readable, row, rows))
    found = (wanted[:, :, None] == selected[:, None, :]) & readable[:, :, None]
    parent = torch.where(found.any(-1), found.int().argmax(-1) + 1, -1) if drafts else selected
    parent = torch.where(row <= 0, 0, parent)
    return torch.cat([parent.new_full((batch, 1), -1), parent], 1)


def copy_links(outputs: BuiltTree, positions: Tensor, first_child: Tensor, next_sibling: Tensor) -> None:
    """Put positions and links [B, N] into SGLang's tensors."""
    index = torch.arange(positions.numel(), device=positions.device)
    for out, values in zip(outputs, (positions, index, first_child, next_sibling), strict=True):
        out.copy_(values.reshape(out.shape))


def _copy_mask(sees: Tensor, lengths: Tensor, tree_mask: Tensor, mode: TreeMaskMode) -> None:
    """Put the mask [B, N, N] into SGLang's layout."""
    batch, nodes, _ = sees.shape
    flat = tree_mask.view(-1)
    if mode is TreeMaskMode.QLEN_ONLY_BITPACKING:
        # The last bit is the type's sign, because not every conversion on a device drops higher bits.
        signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tree_mask.element_size()]
        bit = 1 << torch.arange(nodes, device=sees.device)
        bit[torch.iinfo(signed).bits - 1 :] = torch.iinfo(signed).min
        flat.view(signed)[: batch * nodes] = (sees * bit).sum(-1).flatten().to(signed)
        return
    place = torch.arange(batch * nodes * nodes, device=lengths.device)
    if mode is TreeMaskMode.FULL_MASK:
        request, cell = place // (nodes * nodes), place % (nodes * nodes)
        row, column = cell // nodes, cell % nodes
        lengths = lengths.clamp(min=0)
        before = (lengths.cumsum(0) - lengths)[request] * nodes + request * nodes * nodes
        place = before + row * (lengths[request] + nodes) + lengths[request] + column
    flat[place] = sees.flatten()


def verify_tree_greedy(outcome: Outcome, tree: Tree, target_predict: Tensor) -> None:
    walk = _Traversal(outcome, tree)
    flat_target = target_predict.reshape(-1)
    for _ in range(tree.candidates.shape[1] - 1):
        token = _at(tree.candidates, walk.child)
        walk.step(_checked(flat_target, walk.last) == token, token)
    walk.finish(_checked(flat_target, walk.last))


def tree_speculative_sampling_target_only(
    outcome: Outcome, tree: Tree, call: Sampling, threshold_single: float, threshold_acc: float
) -> None:
    uniforms, final_uniforms, target_probs, draft_probs = call
    batch, nodes, vocab = target_probs.shape
    if batch == 0:
        return
    request = torch.arange(batch, device=uniforms.device)
    walk = _Traversal(outcome, tree)
    mass = uniforms.new_zeros(batch)
    for _ in range(nodes - 1):
        token = _at(tree.candidates, walk.child)
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
        walk.step(hit, token)
        mass = torch.where(hit, 0, mass)
    target = _positive(target_probs[request, walk.node])
    full = walk.accepted == outcome.accept_index.shape[1] - 1
    rejected = torch.where(full[:, None], 0, _positive(draft_probs[request, walk.node]))
    walk.finish(_sample(target, rejected, final_uniforms))


def _sample(target: Tensor, rejected: Tensor, uniform: Tensor) -> Tensor:
    """First token whose running residual exceeds uniform * total, see the public function."""
    residual = (target - rejected).clamp(min=0)
    running = residual.cumsum(1)
    goal = uniform * running[:, -1]
    vocab = target.shape[1]
    token = torch.arange(vocab, device=target.device)
    first = torch.where((running > goal[:, None]) & (residual > 0), token, vocab).amin(1)
    last = torch.where(residual > 0, token, -1).amax(1)
    sampled = torch.where(first < vocab, first, last)
    return torch.where(sampled >= 0, sampled, target.argmax(1))


class _Traversal:
    """A traversal of all requests' trees at once, one visited node per step."""

    def __init__(self, outcome: Outcome, tree: Tree) -> None:
        self._outcome, self._tree = outcome, tree
        self.last = tree.retrive_index[:, 0].long()
        self.child = tree.next_token[:, 0].long()
        self.node = torch.zeros_like(self.child)
        self.accepted = torch.zeros_like(self.child)
        outcome.accept_index[:, 0] = self.last

    @property
    def active(self) -> Tensor:
        deeper = self.accepted < self._outcome.accept_index.shape[1] - 1
        return deeper & (self.child >= 0) & (self.child < self._tree.candidates.shape[1])

    def step(self, hit: Tensor, token: Tensor) -> None:
        """Accept the visited children of `hit`, pass on to the sibling elsewhere."""
        active, child = self.active, self.child
        hit = active & hit
        put(self._outcome.predicts, self.last, token, hit)
        self.accepted = self.accepted + hit
        self.node = torch.where(hit, child, self.node)
        self.last = torch.where(hit, _at(self._tree.retrive_index, child), self.last)
        column = self.accepted[:, None]
        kept = self._outcome.accept_index.gather(1, column)
        self._outcome.accept_index.scatter_(
            1, column, torch.where(hit[:, None], self.last[:, None].to(kept.dtype), kept)
        )
        onward = torch.where(hit, _at(self._tree.next_token, child), _at(self._tree.next_sibling, child))
        self.child = torch.where(active, onward, self.child)

    def finish(self, token: Tensor) -> None:
        """Put the last token and the number of accepted drafts."""
        put(self._outcome.predicts, self.last, token, torch.ones_like(self.last, dtype=torch.bool))
        self._outcome.accept_token_num.copy_(self.accepted)


def _positive(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 0)


def _at(per_node: Tensor, node: Tensor) -> Tensor:
    """[bs] entries of each request's node; any entry for a node that is not there."""
    return per_node.gather(1, node.clamp(0, per_node.shape[1] - 1)[:, None])[:, 0].long()


def _checked(flat: Tensor, place: Tensor) -> Tensor:
    """flat[place], -1 outside."""
    inside = (place >= 0) & (place < flat.shape[0])
    return torch.where(inside, flat[place.clamp(0, flat.shape[0] - 1)].long(), -1)


def put(flat: Tensor, place: Tensor, value: Tensor, live: Tensor) -> None:
    """flat[place] = value where live and inside; one extra place takes the rest."""
    target = torch.where(live & (place >= 0) & (place < flat.shape[0]), place, flat.shape[0])
    longer = torch.cat([flat, flat.new_zeros(1)])
    flat.copy_(longer.scatter(0, target, value.to(flat.dtype))[:-1])


def read_spans(spans: Spans) -> None:
    """Table entries of all spans into `values`, 0 outside of the table."""
    table, rows, start, counts, out, offsets = spans
    offsets = offsets_of(counts, out.shape[0]) if offsets is None else offsets
    span, column, owned = owners(offsets, out.shape[0])
    owned = owned & (column < _picked(counts, span))
    values = _picked(start, span).long().clamp(min=0) + column
    if table is not None and rows is not None:
        values = table_entries(table, _picked(rows, span), values)
    out.copy_(torch.where(owned, values, out))


def write_spans(spans: Spans) -> None:
    """`values` into the table's entries; nothing is written outside of the table."""
    table, rows, start, counts, values, _ = spans
    assert table is not None and rows is not None
    num_rows, width = table.shape
    span, column, owned = owners(offsets_of(counts, values.shape[0]), values.shape[0])
    row, position = _picked(rows, span).long(), _picked(start, span).long() + column
    owned = owned & (row >= 0) & (row < num_rows) & (position >= 0) & (position < width)
    put(table.view(-1), row * width + position, values, owned)


def list_sequences(sequences: Sequences) -> None:
    """See `Sequences`."""
    table, rows, lengths, indptr, indices, repeat, growth, num_steps, page_size, limit, sink = sequences
    assert table is not None and rows is not None
    length = lengths.long().clamp(min=0).repeat_interleave(repeat)
    number = torch.arange(repeat, device=table.device).repeat(rows.shape[0])
    kept, first_draft = length.clamp(max=limit), branch_start(length, number, num_steps, page_size)
    for step, (ends, out) in enumerate(zip(indptr, indices, strict=True)):
        offsets = offsets_of(kept + 1 + step + growth * number, out.shape[0])
        ends[: len(offsets)] = offsets
        owner, column, owned = owners(offsets, out.shape[0])
        prefix = _picked(kept, owner)
        early = torch.where(column < sink, column, column + _picked(length, owner) - prefix)
        position = torch.where(column < prefix, early, _picked(first_draft, owner) + column - prefix)
        values = table_entries(table, _picked(rows, owner // repeat), position)
        out.copy_(torch.where(owned, values, out))


def table_entries(table: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """table[rows, columns] as int64, 0 where there is no such entry."""
    num_rows, width = table.shape
    if table.numel() == 0:
        return torch.zeros_like(columns, dtype=torch.int64)
    inside = (rows >= 0) & (rows < num_rows) & (columns >= 0) & (columns < width)
    return torch.where(inside, table[rows.clamp(0, num_rows - 1), columns.clamp(0, width - 1)].long(), 0)


def _picked(per_row: Tensor, row: Tensor) -> Tensor:
    return per_row[row] if per_row.shape[0] else torch.zeros_like(row)


def branch_start(lengths: Tensor, branch: Tensor, num_steps: int, page_size: int) -> Tensor:
    """Position of the first draft of a branch. Each branch but the first begins with a copy of the prefix's last,
    partly filled page."""
    pages = (lengths % page_size + num_steps + page_size - 1) // page_size
    return lengths + branch * pages * page_size
