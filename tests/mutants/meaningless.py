"""Changes of one operator that mean nothing: no mutant is drawn from them."""

from __future__ import annotations

MEANINGLESS = {
    # The sum passes the goal at a weight above 0.
    ("specdec_kernels/sampling/reference.py", "& (weights > 0)", ">="),
    ("specdec_kernels/compat/sglang/reference.py", "& (residual > 0)", ">="),
    ("specdec_kernels/compat/sglang/kernel.py", "& (weight > 0)", ">="),
    ("specdec_kernels/attention/api.py", "in_order and num_splits > 1", ">="),  # one split has one order
    # A key more is read, or masked, in vain.
    ("specdec_kernels/attention/device.py", "free_end = length + first_node + 1", "0"),
    ("specdec_kernels/attention/device.py", "lowest = tl.min(row_position, 0) - window + 1", "0"),
    ("specdec_kernels/attention/kernel.py", "last_node = (tile * BLOCK_M + BLOCK_M - 1)", "0"),
    ("specdec_kernels/mla/kernel.py", "(tile * BLOCK_M + BLOCK_M - 1)", "0"),
    ("specdec_kernels/attention/device.py", "deepest = tl.max(depth", "min"),  # of rows that are not in use
    ("specdec_kernels/attention/device.py", "tl.minimum(nodes, used - 1)", "0"),  # of rows that are not in use
    ("specdec_kernels/attention/device.py", "tl.where(first_node < used", "<="),
    (
        "specdec_kernels/attention/kernel.py",
        "mask_row, depths_row, row_position, score_scale, soft_cap, begin, split_stop",
        "depths_row, mask_row",
    ),  # a walk in order has neither
    # Fixed splits have neither length.
    ("specdec_kernels/attention/kernel.py", "longest_split, max_splits, window, True", "max_splits, longest_split"),
    # A tile is masked that all rows see entirely.
    ("specdec_kernels/attention/kernel.py", "masked = start + BLOCK_N > free_end", ">="),
    ("specdec_kernels/attention/kernel.py", "masked | (start < free_begin)", "<="),
    ("specdec_kernels/attention/device_fp8.py", "masked = start + BLOCK_N > free_end", ">="),
    ("specdec_kernels/attention/device_fp8.py", "masked | (start < free_begin)", "<="),
    # Two formulas that agree at their border, to the bit or to a rounding.
    ("specdec_kernels/attention/device.py", "tl.where(position < reach", "<="),
    ("specdec_kernels/attention/device.py", "tl.where(behind < 0", "<="),
    ("specdec_kernels/attention/device.py", "tl.abs(x) < 0.25", "<="),
    ("specdec_kernels/attention/device.py", "tl.where(x > -126.0", ">="),
    ("specdec_kernels/attention/device.py", "tile_top > top + _LAZY_LIMIT", ">="),
    # Programs that find nothing to do, or walk a list in turns.
    ("specdec_kernels/attention/kernel.py", "if split >= live", ">"),
    ("specdec_kernels/attention/types.py", "min(programs, resident)", "max"),
    ("specdec_kernels/attention/api.py", "partial_bytes > configs.INVARIANT_PARTIAL_BYTES", ">="),
    # Sums and quotients that never are just at a bound.
    ("specdec_kernels/adaptive/kernel.py", "keep * own > _LEAST_EVIDENCE", ">="),
    ("specdec_kernels/adaptive/reference.py", "keep * above[:, 1:] > LEAST_EVIDENCE", ">="),
    ("specdec_kernels/adaptive/kernel.py", "tl.max(rate, 0) < last_rate", "<="),
    ("specdec_kernels/adaptive/reference.py", "rates[best] < rates[last] *", "<="),
    ("specdec_kernels/adaptive/kernel.py", "(place < PATH)", "<="),  # counts end at the path
    # The last choice stays if it is the best.
    ("specdec_kernels/adaptive/kernel.py", "tl.where(best > last", ">="),
    ("specdec_kernels/adaptive/reference.py", "(KEEP_SMALLER if best > last", ">="),
    # Sizes of tiles, numbers of programs, and counters that are kept for later: speed.
    ("specdec_kernels/adaptive/kernel.py", "COMPARED=min(", "max"),
    ("specdec_kernels/adaptive/kernel.py", " ROWS=min(", "max"),
    ("specdec_kernels/adaptive/kernel.py", "if batch <= FEW_ROWS", "<"),
    ("specdec_kernels/commit/kernel.py", "rows = min(lanes(batch * path)", "max"),
    ("specdec_kernels/texts/kernel.py", "(triton.cdiv(batch * (width + 1), config.copy)", "0"),
    ("specdec_kernels/compat/sglang/index/kernel_tables.py", "programs = min(", "max"),
    ("specdec_kernels/compat/sglang/index/kernel_tables.py", "end = tl.minimum(used", "maximum"),  # visited in vain
    ("specdec_kernels/compat/sglang/index/kernel_tables.py", "batch, place < capacity", "<="),  # offsets end there too
    ("specdec_kernels/compat/sglang/index/kernel_drafts.py", "if PAGE_SIZE > 1 and TOPK > 1:", ">="),  # of no tails
    ("specdec_kernels/compat/sglang/index/kernel_slots.py", "if size > config.move_direct", ">="),
    ("specdec_kernels/compat/sglang/index/kernel_drafts.py", "(min(triton.cdiv(capacity, block), ", "max"),
    ("algorithms/dflash.py", "if depth + 1 == self._block", "0"),  # links are made anew instead of taken
    # Bounds of the number of splits.
    ("specdec_kernels/attention/api.py", "work.window - 1 + work.num_slots + work.split_tokens // 8 - 1)", "0"),
    ("specdec_kernels/attention/api.py", "-(-(work.window - 1", "0"),
    ("specdec_kernels/attention/types.py", "min(rounds, self.max_splits // self.first_splits)", "max"),
    ("specdec_kernels/verify/kernel_tree.py", "if splits > 1 else {})", ">="),  # a team of one is launched as a team
    ("specdec_kernels/verify/kernel_tree.py", "(depth + 1 >= DEPTH)", "0"),  # a leaf that is entered is left at once
    ("specdec_kernels/verify/kernel_tree.py", "(depth + 1 >= DEPTH)", ">"),
    ("specdec_kernels/projection/kernel.py", "max(tiles, _FEWEST_TICKETS)", "min"),
    ("specdec_kernels/projection/kernel.py", "found.shape[0] < tiles", "<="),
    ("specdec_kernels/projection/kernel.py", "if config.splits > 1 and out.ndim", ">="),  # one split is read back
    ("specdec_kernels/projection/kernel.py", "if HELD == 0", "!="),  # when the next kernel starts
    ("specdec_kernels/projection/kernel_argmax.py", "IN_ORDER=config.splits > 1", ">="),  # no later split
    ("specdec_kernels/projection/kernel_argmax.py", "(other_column < column)", "<="),  # ranks hold other columns
    ("specdec_kernels/projection/kernel_argmax.py", "call, lane < 2)", "<="),  # of two lanes
    ("specdec_kernels/mla/kernel.py", "if split_start >= last_key", ">"),  # a split that the merge does not read
    ("specdec_kernels/mla/kernel.py", "if start + BLOCK_N > free_end", ">="),  # masked, where all rows see all
    ("specdec_kernels/mla/kernel.py", "last_key - 1, 0) // (split_tokens", "0"),  # fewer splits
    ("specdec_kernels/mla/kernel.py", "partial = splits > 1", ">="),  # the merge of one split
    ("specdec_kernels/mla/kernel.py", "max_splits(rows, latent)", "latent, rows"),  # of r (c + 1) or c (r + 1) numbers
    ("specdec_kernels/interpreter.py", "if vars(self).keys() ==", "!="),  # nothing is kept
    (
        "specdec_kernels/sampling/kernel_nucleus.py",
        "(min(triton.cdiv(rows * chunks, block_t), config.programs),)",
        "max",
    ),
    ("specdec_kernels/verify/kernel.py", "if NODES > 1:", ">="),  # a loop that does not turn
    ("specdec_kernels/verify/kernel_tree.py", "misses & (weight > 0)", ">="),  # a node of weight 0 is left
    # What is done for nothing, a bound that another repeats, or a step of a search that ends at the same root.
    ("specdec_kernels/verify/kernel_tree.py", "tl.max(flags.to(tl.int32), 0) > 0", ">="),
    ("specdec_kernels/verify/kernel_tree.py", "tl.where(left > 0, q, 0.0)", ">="),
    ("specdec_kernels/verify/kernel_tree.py", "asks & (draws > 1)", ">="),
    ("specdec_kernels/verify/kernel_tree.py", "(step < _RATE_STEPS)", "<="),
    ("specdec_kernels/verify/kernel_tree.py", "tl.log(tl.where(rejected > 0", ">="),
    ("specdec_kernels/verify/kernel_tree.py", "power = tl.where(rejected > 0", ">="),
    ("specdec_kernels/verify/kernel_tree.py", "tl.where(surplus > 0, rho, low)", ">="),
    ("specdec_kernels/verify/kernel_tree.py", "tl.where(surplus > 0, high, rho)", ">="),
    ("specdec_kernels/verify/kernel_tree.py", "(falls < 0) & (guess > low) & (guess < high)", "<="),
    ("specdec_kernels/verify/kernel_tree.py", "(falls < 0) & (guess > low) & (guess < high)", ">="),
    ("specdec_kernels/verify/kernel_tree.py", "asks & (draws > 0)", ">="),
    ("specdec_kernels/verify/kernel_tree.py", "while times < tl.max(draws, 0)", "<="),
    ("specdec_kernels/verify/kernel_tree.py", "while reach < NODES", "<="),
    ("specdec_kernels/verify/kernel_tree.py", "(tokens >= 0) & (temperature > 0)[:, None]", ">="),
    ("specdec_kernels/verify/kernel_tree.py", "(step < 2 * NODES)", "<="),
    ("specdec_kernels/verify/kernel_tree.py", "has = going & (candidate >= 0)", ">"),
    ("specdec_kernels/verify/kernel_tree.py", "drawing = has & (temperature > 0)", ">="),
    ("specdec_kernels/verify/kernel_tree.py", "settles = judged & (due > 0)", ">="),
    ("specdec_kernels/verify/kernel_tree.py", "candidate) < share)), judged", "<="),
    ("specdec_kernels/sampling/kernel_stats.py", "tl.max(flag.to(tl.int32), 0) > 0", ">="),
    ("specdec_kernels/texts/kernel_draft.py", "while step < limit", "<="),
    ("specdec_kernels/kv_index/reference.py", "torch.where(nodes >= 0, source", ">"),
    # Summed in vain: the node is left, or the sum is taken once more where the walk ends.
    ("specdec_kernels/verify/kernel_tree.py", "(due > 0) & (uniform < weight)", "<="),
    ("specdec_kernels/verify/kernel_tree.py", "(has == 0) & (end > 0)", ">="),
    ("specdec_kernels/verify/kernel_tree.py", "leaf = (entry(children, lane, candidate) < 0)", "<="),  # 0 is no child
    ("specdec_kernels/kv_index/kernel.py", "(low >= high)", ">"),  # the middle of equal bounds is both
    # Node 0 stands first on every path, where it does not move.
    ("specdec_kernels/kv_index/kernel.py", "moves = on_path & (node >= 0)", ">"),
    # A tree of N nodes is at most N - 1 deep, and a rank is above 0 or -1.
    ("specdec_kernels/texts/kernel_draft.py", "tl.minimum(size - next_place, NODES - 1)", "0"),
    ("specdec_kernels/texts/kernel_draft.py", "found = rank >= 0", ">"),
    ("specdec_kernels/texts/kernel_draft.py", "(taken < MATCHES) & (top >= 0)", ">"),
    ("specdec_kernels/texts/kernel_draft.py", "& (rank >= 0)[None, :]", ">"),
    ("specdec_kernels/texts/kernel_draft.py", "tl.sum((rank >= 0)", ">"),
    ("specdec_kernels/texts/kernel_draft.py", "kept = (further >= 0)", ">"),
    ("specdec_kernels/texts/kernel_find.py", "& (tl.max(rank, 0) >= 0)", ">"),
    ("specdec_kernels/texts/kernel_find.py", "MATCHES - 1, mask=rank >= 0", ">"),
    ("specdec_kernels/texts/kernel_find.py", "list_ptr + entry, mask=rank >= 0", ">"),
    # No two places have one rank.
    ("specdec_kernels/texts/kernel_find.py", "tl.where(rank > least", ">="),
    ("specdec_kernels/texts/kernel_find.py", "enters = rank > held", ">="),
    ("specdec_kernels/texts/kernel_select.py", "while top > least", ">="),
    # A match that leads to nothing new is no sibling, and the first match is the child of none.
    ("specdec_kernels/texts/kernel_draft.py", "beside = (match[None, :] < match[:, None])", "<="),
    ("specdec_kernels/texts/kernel_draft.py", "above = tl.where(split > 0", ">="),
    # Which texts are read first, by which both passes part; a turn in which nothing is compared.
    ("specdec_kernels/texts/kernel_find.py", "newest = (age < NEW_TEXTS)", "<="),
    ("specdec_kernels/texts/kernel_find.py", "& (position >= size - 1 - WIDTH)", ">"),
    ("specdec_kernels/texts/kernel_find.py", "& (position >= size - 1 - WIDTH)", "0"),
    ("specdec_kernels/texts/kernel_select.py", "while (back < WINDOW)", "<="),
    # Sizes of tables and numbers of programs.
    ("specdec_kernels/texts/kernel.py", "(2 * batch - 1).bit_length()", "0"),
    ("specdec_kernels/texts/kernel.py", "pairs = batch > config.few", ">="),
    ("specdec_kernels/texts/kernel.py", "parts = lanes(max(1, min(config.parts", "min"),
    ("specdec_kernels/texts/kernel.py", "programs = min(2 * num_processors", "max"),
    ("specdec_kernels/texts/reference.py", "_drafts(host, found, num_nodes - 1, order)", "0"),
    ("specdec_kernels/verify/kernel_tree.py", "if kinds and warps > 8", ">="),
    ("algorithms/runtime/models/decoder.py", "add_rms_norm(projected, residual, self", "residual, projected"),  # a sum
    # Node 0 is no child; what is forced beyond what was asked for is walked back.
    ("algorithms/runtime/grammar.py", "while child >= 0:", ">"),
    ("algorithms/runtime/grammar.py", "while len(found) < most", "<="),
    # What the programs of a team tell each other, and what they wait for: the interpreter runs one after the other.
    ("specdec_kernels/verify/kernel_tree.py", "triton.cdiv(vocab, block_v), MOST_PROGRAMS", "block_v, vocab"),
    ("specdec_kernels/verify/kernel_tree.py", "place + 1, splits), word + 2", "0"),
    ("specdec_kernels/verify/kernel_tree.py", "return whole, whole, word + 1", "0"),
    ("specdec_kernels/verify/kernel_tree.py", 'if rule == "k_seq":', "!="),
    ("specdec_kernels/verify/kernel_tree.py", "num_words = min(max_depth + 1, num_nodes)", "0"),
    ("specdec_kernels/sampling/kernel_nucleus.py", "members = torch.empty(rows, chunks, NUM_EDGES - 1, keep", "0"),
    # The uniform of the lane behind the last node is read in vain, and the mask has no bit there.
    ("specdec_kernels/verify/device.py", "here = in_batch[:, None] & (node >= 1) & (node < NODES)", "<="),
    ("specdec_kernels/sampling/kernel_forbid.py", "in_tree = in_row[:, None] & (node < NODES)", "<="),
    # Nothing is left of p behind a rejection at weight 1 only where p = q, and there no child is rejected; at a weight
    # below 1 the node's own becomes 0.
    ("specdec_kernels/verify/kernel_tree.py", "tl.where(asks & (below > 0)", ">="),
    ("specdec_kernels/verify/reference_tree.py", "lowered = torch.where(below > 0", ">="),
    ("specdec_kernels/verify/reference_tree.py", "shrinks = judged & (mass > 0)", ">="),
    ("specdec_kernels/verify/reference_tree.py", "shrinks = rejects & (residual.sum(-1) > 0)", ">="),
    # An entry with p = rho q leaves nothing; the bisection ends at the same root.
    ("specdec_kernels/verify/reference_tree.py", "first = (ratio > middle", ">="),
    ("specdec_kernels/verify/reference_tree.py", "** draws > middle * shared", ">="),
    # One more step of a search finds what is known already, or a wider bracket holds the same threshold.
    ("specdec_kernels/sampling/device.py", "searching = high - low > 1", ">="),
    ("specdec_kernels/sampling/kernel_settle.py", "low = tl.max(tl.where(rises", "min"),
    # A key that fewer or more groups reach: rows of which they do not tell all are deferred.
    ("specdec_kernels/sampling/device.py", "while tl.max(searching.to(tl.int32), 0)", "min"),
    ("specdec_kernels/sampling/device.py", "low = tl.where(searching & (reached > most)", ">="),
    ("specdec_kernels/sampling/device.py", "found = tl.where(searching & (reached <= most)", "<"),
    ("specdec_kernels/sampling/device.py", "(found < enough)", "<="),
    ("specdec_kernels/sampling/device.py", "high = tl.where(searching & (reached <= most)", "<"),
    ("specdec_kernels/sampling/kernel_filter.py", "(lowest >= from_least)", ">"),
    # A filter of the whole vocabulary keeps all; so does a search from -inf on, and one in the row.
    ("specdec_kernels/sampling/device.py", "(wanted < VOCAB)", "<="),
    ("specdec_kernels/sampling/kernel_settle.py", "tl.where(value > float", ">="),
    ("specdec_kernels/sampling/kernel_settle.py", "((pinned == 0) | (below < nucleus.EDGES))", "<="),
    # No weight adds a unit, and a share of 0 leads to the same token as the smallest.
    ("specdec_kernels/sampling/device.py", "some = total > 0", ">="),
    ("specdec_kernels/sampling/device.py", "(begin <= goal", "<"),
    # No value stands on an edge that parts the weight at the goal, so both classes beside it give one threshold.
    ("specdec_kernels/sampling/kernel_settle.py", "known & (above >= goal", ">"),
    # Each of the two is asked whether it is at least 0.
    ("specdec_kernels/verify/kernel.py", "_looking(candidate, target", "target, candidate"),
    # Strips of another length.
    ("specdec_kernels/sampling/kernel.py", "next_power_of_2(triton.cdiv(vocab, STEP))", "STEP, vocab"),
    # A group of another width; edges are stored for the only row of a program, or the threshold is found without.
    ("specdec_kernels/sampling/device.py", "width = min(max(triton.next_power_of_2(vocab)", "max"),
    ("specdec_kernels/sampling/kernel_filter.py", "if tl.max(listed", "min"),
    # A class that just fits is looked for in the row instead.
    ("specdec_kernels/sampling/kernel_settle.py", "(tl.max(counts, 1) <= KEEP)", "<"),
    ("specdec_kernels/sampling/kernel_nucleus.py", "VECTOR)) <= MOST", "<"),
    # A greedy row is filtered in vain; an infinite sum of probabilities stays one.
    ("specdec_kernels/sampling/kernel_filter.py", "valid & (temperature > 0) & ((wanted", ">="),
    ("specdec_kernels/sampling/kernel_stats.py", "(mass < float", "<="),
    ("specdec_kernels/sampling/kernel_stats.py", "(plain < float", "<="),
    # 0 stays 0, divided or multiplied.
    ("specdec_kernels/sampling/reference.py", "torch.where(value > 0, value / factor", ">="),
    ("specdec_kernels/sampling/kernel_penalties.py", "tl.where(value > 0, value / factor", ">="),
    # More words than are used.
    ("specdec_kernels/verify/kernel_tree.py", "num_words = min(max_depth + 1, num_nodes)", "max"),
    ("specdec_kernels/tree/kernel_selection.py", ", 0) >= wanted", ">"),  # any bound down to the first left out will do
    ("specdec_kernels/tree/kernel_topk.py", "top <= FLOAT32_MAX", "<"),  # computed once more, with the same outcome
    ("specdec_kernels/tree/kernel.py", "_WORD_BITS - 1).to(tl.int64)", "0"),  # behind a word the mask is not used
    ("specdec_kernels/sampling/device.py", "width = min(max(triton.next_power_of_2(vocab)", "min"),
    ("specdec_kernels/sampling/device.py", "whole - 1)", "0"),  # no product with a uniform below 1 rounds to the whole
    ("specdec_kernels/verify/kernel_rejection.py", "tau = tl.max(tau, 1)", "min"),  # of one entry
    # Where there are as many groups as slots, nothing is deferred; a filter that is off keeps every token.
    ("specdec_kernels/sampling/kernel_filter.py", "may_defer = num_groups > slots", ">="),
    ("specdec_kernels/sampling/kernel_filter.py", "if GROUPS > SLOTS", ">="),
    ("specdec_kernels/sampling/kernel_filter.py", "& ((wanted > 0) | (share < 1) | (lowest > float", ">="),
    ("specdec_kernels/sampling/kernel_filter.py", "& ((wanted > 0) | (share < 1) | (lowest > float", "<="),
    # Two guards of one thing, either of which is enough.
    ("specdec_kernels/sampling/kernel_filter.py", "valid = top > 0 if PROBS else top > float", ">="),
    ("specdec_kernels/verify/kernel_rejection.py", "(column <= DEPTH) & (column < count", "<"),
    ("specdec_kernels/verify/kernel_rejection.py", "in_batch & usable & (temperature > 0), uniform", ">="),
    ("specdec_kernels/verify/kernel_rejection.py", "bonus = tl.where((temperature > 0)", ">="),
    ("specdec_kernels/verify/kernel_rejection.py", "(step <= reach) & (temperature > 0)", ">="),
    ("specdec_kernels/verify/kernel_rejection.py", "live = (row < rows)", "<="),
    ("specdec_kernels/tree/reference.py", "torch.where(probs > 0, probs.clamp", ">="),
    # Computed once more, or for rows that draw nothing.
    ("specdec_kernels/sampling/kernel_stats.py", "_any(temperature > 0)", ">="),
    ("specdec_kernels/sampling/kernel_stats.py", "_any((temperature > 0)", ">="),
    ("specdec_kernels/sampling/kernel_stats.py", "top <= d.FLOAT32_MAX", "<"),
    # Which groups are gathered: rows of which they do not tell all are deferred.
    ("specdec_kernels/sampling/kernel_filter.py", "0x7FFFFFFF), 1).to(tl.int64) - 1", "0"),
    ("specdec_kernels/sampling/kernel_filter.py", "enough = tl.maximum(", "minimum"),
    ("specdec_kernels/sampling/kernel_filter.py", "tl.minimum(wanted, most)", "maximum"),
    ("specdec_kernels/sampling/kernel_filter.py", "low = tl.min(tl.where(group < GROUPS, key_max", "max"),
    ("specdec_kernels/sampling/kernel_filter.py", "least = tl.min(", "max"),
    ("specdec_kernels/sampling/kernel_filter.py", "count_from(value, from_least) >= wanted", ">"),
    ("specdec_kernels/sampling/kernel_filter.py", "(reached >= share * total)", ">"),
    ("specdec_kernels/sampling/kernel_filter.py", "wanted > 0, share < 1", "<="),
    ("specdec_kernels/sampling/kernel_filter.py", "value >= d.spread_rows(from_least)", ">"),
    ("specdec_kernels/sampling/kernel_filter.py", "goal = tl.where(share < 1", "<="),
    ("specdec_kernels/sampling/kernel_filter.py", "searched = listed & (share < 1)", "<="),
    ("specdec_kernels/sampling/kernel_filter.py", "key_max >= complete.to(tl.int32)", ">"),
    ("specdec_kernels/sampling/kernel_filter.py", "complete.to(tl.int32)[:, None]) & (group < GROUPS)", "<="),
    ("specdec_kernels/sampling/kernel_filter.py", "tl.where(group < GROUPS, key_max", "<="),
    ("specdec_kernels/sampling/kernel_filter.py", "if STRIPS > SLOTS", ">="),
    ("specdec_kernels/sampling/kernel_filter.py", "lowest = tl.where(least > 0", ">="),
    ("specdec_kernels/sampling/kernel_settle.py", "in_row & (task > nucleus.WHOLE)", ">="),
    # A row that is not searched has no key between its bounds, or one; a wider bracket holds the same threshold.
    ("specdec_kernels/sampling/kernel_settle.py", " complete + 1)", "0"),
    ("specdec_kernels/sampling/kernel_settle.py", " bottom + 1)", "0"),
    ("specdec_kernels/sampling/kernel_settle.py", "tl.where(by_mass, high, low + 1)", "0"),
    ("specdec_kernels/sampling/kernel_settle.py", "tl.where(fits, high_key, low_key + 1)", "0"),
    ("specdec_kernels/sampling/kernel_settle.py", "tl.minimum(high, top)", "maximum"),
    ("specdec_kernels/sampling/kernel_settle.py", "high = tl.min(", "max"),
    ("specdec_kernels/tree/kernel_selection.py", "tl.where(prob > 0, tl.minimum(prob, 1.0)", ">="),  # of two zeros
    ("specdec_kernels/verify/kernel_tree.py", "candidate = end - 1", "0"),  # node 0 is a child of none
    # A code of NaN is a number in the interpreter; on a GPU the parity tests see it.
    ("specdec_kernels/attention/device_fp8.py", "rows_and_dims(positions < stop", "<="),
    ("specdec_kernels/kv_write/kernel.py", "if H > 0:", ">="),  # a branch that no program takes
    ("specdec_kernels/kv_write/kernel.py", "if REST > 0:", ">="),  # of no elements
    ("specdec_kernels/kv_write/kernel.py", "size < 0.015625", "<="),  # at 2^-6 both formulas give the code 8
    ("specdec_kernels/verify/kernel_tree.py", "tl.abs(surplus) > _RATE_ERROR", ">="),  # no sum equals a tolerance
    ("specdec_kernels/verify/kernel_tree.py", "rate >= 0", ">"),  # it is above 0, or -1
    ("specdec_kernels/verify/kernel_tree.py", "high - low > _RATE_ERROR", ">="),  # nor does a width
}
"""Changes that were looked at and change nothing: file, a text that holds the operator, the new one."""
