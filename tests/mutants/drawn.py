"""Mutants that nobody chose: one operator of the kernels or of the runtime changed at random.

A comparison takes or leaves its bound (`<` and `<=`) or turns round (`==` and `!=`), `+ 1` and `- 1` become `+ 0`
and `- 0`, `min` and `max` change places, or two neighbouring names of a call do. The four kinds are equally likely.
Sites that no test can see are left alone: types, messages, sizes of tiles, what runs on a GPU or with another package
only, and comparisons whose bound decides nothing.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutant import ROOT, Mutant

_ALGORITHMS = "tests/algorithms/"
_ENGINE = tuple(
    f"{_ALGORITHMS}test_{name}.py"
    for name in ("request", "scheduler", "engine", "levels", "top_logprobs", "fuzz", "kv_dtype", "forbidden_tokens",
                 "lookup", "sampling_parameters", "faults", "graphs", "prefill", "drafters")
)  # fmt: skip
_MODELS = tuple(
    f"tests/runtime/test_{name}.py"
    for name in ("loading", "eagle", "models_parity", "architectures", "dense_mixer", "fusion", "tokenizer",
                 "deterministic")
)  # fmt: skip
_FAMILY_TESTS = {
    "": ("test_checks", "test_launch", "test_facade", "test_tuning", "test_interpreter"),
    "attention": (
        "test_attention", "test_attention_plan", "test_attention_features", "test_small_tiles", "test_batch_invariance"
    ),
    "compat.sglang": ("test_compat_sglang",),
    "compat.sglang.index": ("test_sglang_index",),
    "norm": ("test_norm", "test_projection"),
    "projection": ("test_projection", "test_batch_invariance"),
    "sampling": ("test_sampling", "test_sampling_filters", "test_exact_distribution"),
    "tree": ("test_tree", "test_tree_selection"),
    "verify": ("test_verify", "test_rejection_distribution", "test_target_only_distribution", "test_tree_distribution"),
}  # fmt: skip
"""Test files of a family where they are not `test_FAMILY`."""
_USERS = {
    "all_reduce": ("projection",),
    "sampling.device": ("tree", "verify"),
    "kv_index.reference": ("compat.sglang.index",),
}
"""Families whose cases run what no case of a file's own family does."""
_FILE_TESTS = {
    "algorithms/registry.py": ("tests/algorithms/test_plugin.py",),
    "algorithms/runtime/backends/packages.py": ("tests/runtime/test_packages.py", "tests/runtime/test_backends.py"),
    "algorithms/runtime/collectives.py": ("tests/algorithms/test_tensor_parallel.py",),
    "algorithms/runtime/models/sharding.py": ("tests/algorithms/test_tensor_parallel.py",),
    "algorithms/runtime/tensor_parallel.py": ("tests/algorithms/test_tensor_parallel.py",),
}
"""Test files of a file where they are not those of its folder."""
_UNSTEADY = f"--deselect={_ALGORITHMS}test_piggyback.py::test_the_ledger_adds_up_with_prompts_in_steps"
"""A test of times that other processes disturb would catch mutants in vain."""
_DRAFTERS = ("drafters", "drawn_trees", "adaptive")
_NEAREST = (
    dict.fromkeys(("dflash", "eagle", "eagle3", "naive_eagle", "standalone", "tree_drafting", "tree_shape"), _DRAFTERS)
    | dict.fromkeys(("drawing", "drawn_tree"), ("drawn_trees",))
    | dict.fromkeys(("adaptive", "backlog"), ("adaptive",))
    | dict.fromkeys(("chunk", "prefill", "staging"), ("prefill", "piggyback"))
    | dict.fromkeys(("constraints", "grammar", "join_trees"), ("constraints", "mixed"))
    | dict.fromkeys(("session", "step"), ("engine", "top_logprobs", "piggyback", "adaptive", "constraints"))
    | {"engine": ("engine", "piggyback"), "cuda_graph": ("graphs", "adaptive", "piggyback")}
    | dict.fromkeys(("lookup", "ngram", "suffix", "texts"), ("lookup",))
    | {"mixed": ("mixed",), "draft_check": ("plugin",)}
)
"""Test files of the runtime that come first for a file, beside the one of its name."""
_LEFT_OUT = {
    "*/cases*.py": "inputs of the tests themselves",
    "*/configs.py": "sizes of tiles, warps and stages for each chip: speed",
    "*/warmup.py": "what is compiled before the first step: speed",
    "*/__init__.py": "names",
    "algorithms/runtime/backends/flash*.py": "runs with another package only",
    "*/clock.py": "runs on a GPU only",
    "*/kernel_library.py": "runs on a GPU only",
    "*/*_hopper*.py": "runs on a GPU only",
}
"""Files that no mutant is drawn from, with the reason."""
_TILES = re.compile(r"(\w*_)?warps|block(_[a-z])?|BLOCK(_[A-Z])?")
"""Names that are given a value for speed alone, as keywords, by assignment, or as what a function returns."""
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
_FLAGGED = re.compile(r"(tl\.max\()+.*\.to\(tl\.int32\)(, \d\))+ > 0")
"""Whether one of the lanes is flagged."""
_GUESSES = ("guess_threshold", "sample_groups", "store_edges", "rows_per_program")
"""Functions whose results decide how fast something is and nothing else: where a search begins, a size of tiles."""
_ON_A_GPU = ("_held_weight", "_with_held_weight", "_team_sum", "received", "_received_sums", "half_queries",
             "half_queries_in_halves", "_in_groups")  # fmt: skip
"""Functions of machine instructions, of bfloat16, of programs that wait for each other, or that choose a kernel of one
chip: the interpreter has none."""
_NOT_CALLED = ("_in_groups", "launch_in_groups", "_held_weight", "_with_held_weight")
"""Calls that are made on a GPU only, or whose answer is used there only."""
_MACHINES = ("'cuda'", "'interpreter'")
"""What a comparison asks for that is always so or never, where the tests run."""
_SPREAD = {"WARPS", "VECTOR"}
"""How entries are spread over threads. Which of the two is which changes the order of additions."""
_SYMMETRIC = ("min", "max", "minimum", "maximum", "zip", "isinstance", "getattr", "print", "equal", "logaddexp")
_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="
}  # fmt: skip
_WRITTEN = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
_PAIRS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}


@dataclass(frozen=True)
class Site:
    """Characters `start` … `end` of a file, and what they become."""

    kind: str
    path: str
    line: int
    start: int
    end: int
    new: str


@dataclass(frozen=True)
class DrawnMutant(Mutant):
    """A mutant that knows its place instead of a text that occurs once."""

    site: Site | None = None

    def changed(self, root: Path = ROOT) -> str:
        assert self.site is not None
        source = (root / self.path).read_text(encoding="utf-8")
        return source[: self.site.start] + self.site.new + source[self.site.end :]


def mutated_files() -> list[Path]:
    """The files that mutants are drawn from."""
    found = [*(ROOT / "specdec_kernels").rglob("*.py"), *(ROOT / "algorithms").rglob("*.py")]
    files = sorted(path.relative_to(ROOT) for path in found)
    return [path for path in files if not any(path.match(pattern) for pattern in _LEFT_OUT)]


def tests_of(path: Path) -> tuple[str, ...]:
    """The pytest arguments that run what belongs to a file, the quickest first."""
    if path.parts[0] == "specdec_kernels":
        family = ".".join(path.parts[1:-1])
        files = [f"tests/kernels/{name}.py" for name in _FAMILY_TESTS.get(family, (f"test_{family}",))]
        files = [file for file in files if (ROOT / file).is_file()]
        users = [*_USERS.get(family, ()), *_USERS.get(f"{family}.{path.stem}", ())]
        cases = [f"[{name}-" for name in (family or "kv_index", *users)]
        names = " or ".join([*cases, *(Path(file).stem for file in files)])
        return ("tests/kernels/test_parity.py", *files, "-k", names)
    named = [f"{folder}test_{path.stem}.py" for folder in ("tests/runtime/", _ALGORITHMS)]
    own = [file for file in named if (ROOT / file).is_file()]
    if path.as_posix() in _FILE_TESTS:
        others: tuple[str, ...] = _FILE_TESTS[path.as_posix()]
    elif "models" in path.parts:
        others = (*_MODELS, f"{_ALGORITHMS}test_drafters.py")
    elif "backends" in path.parts:
        others = (
            "tests/runtime/test_backends.py",
            "tests/runtime/test_paged_attention.py",
            f"{_ALGORITHMS}test_engine.py",
        )
    else:
        others = (*(f"{_ALGORITHMS}test_{name}.py" for name in _NEAREST.get(path.stem, ())), *_ENGINE, _UNSTEADY)
    return tuple(dict.fromkeys((*own, *others)))


def draw(number: int, seed: int) -> list[DrawnMutant]:
    """`number` mutants, the same ones for the same seed and code."""
    chosen, by_kind = random.Random(seed), dict[str, list[Site]]()
    for path in mutated_files():
        for site in sites_of(path):
            if not _is_meaningless(site):
                by_kind.setdefault(site.kind, []).append(site)
    return [_mutant(chosen.choice(by_kind[chosen.choice(sorted(by_kind))])) for _ in range(number)]


def _is_meaningless(site: Site) -> bool:
    return any(is_in(site, *change) for change in MEANINGLESS)


def is_in(site: Site, path: str, text: str, new: str) -> bool:
    """Whether a site is the change of MEANINGLESS that is given."""
    if (path, new) != (site.path, site.new):
        return False
    source = (ROOT / site.path).read_text(encoding="utf-8")
    place = source.find(text, max(0, site.start - len(text)), site.end + len(text))
    return place >= 0 and place <= site.start < place + len(text)


def _mutant(site: Site) -> DrawnMutant:
    source = (ROOT / site.path).read_text(encoding="utf-8")
    before, after = source.rfind("\n", 0, site.start) + 1, source.find("\n", site.end)
    old = source[before:after].strip()
    new = (source[before : site.start] + site.new + source[site.end : after]).strip()
    name = f"{Path(site.path).stem}:{site.line}"
    return DrawnMutant(name, site.path, old, new, tests_of(Path(site.path)), f"{old}  ->  {new}", site)


def sites_of(path: Path) -> Iterator[Site]:
    """Every change of one operator in the functions of a file."""
    source = (ROOT / path).read_text(encoding="utf-8")
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def at(line: int, column: int) -> int:
        # Columns count bytes.
        start = lines[line - 1]
        return start + len(source[start : lines[line]].encode()[:column].decode())

    def site(kind: str, start: int, end: int, node: ast.expr, new: str) -> Site:
        return Site(kind, path.as_posix(), node.lineno, start, end, new)

    tree = ast.parse(source)
    undecided = _undecided(tree)
    for node in _expressions(tree):
        if node in undecided:
            continue
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
            right = node.comparators[0]
            middle = at(node.left.end_lineno or 0, node.left.end_col_offset or 0), at(right.lineno, right.col_offset)
            kind = type(node.ops[0])
            place = source.find(_WRITTEN[kind], *middle)
            yield site("comparison", place, place + len(_WRITTEN[kind]), node, _COMPARISONS[kind])
        elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)) and _is_one(node.right):
            place = at(node.right.lineno, node.right.col_offset)
            yield site("one", place, place + 1, node.right, "0")
        elif isinstance(node, ast.Call):
            name = _name_of(node)
            if name in _PAIRS and len(node.args) == 2:
                place = at(node.func.end_lineno or 0, node.func.end_col_offset or 0) - len(name)
                yield site("extreme", place, place + len(name), node, _PAIRS[name])
            elif name not in _SYMMETRIC:
                yield from _swaps(node, at, site, source)


def _swaps(node: ast.Call, at, site, source: str) -> Iterator[Site]:  # type: ignore[no-untyped-def]
    """Two neighbouring names of a call change places."""
    # The first two are factors of one product, or a pointer and what is added to it.
    arguments = node.args[1:] if _name_of(node) in ("fma", "_row") else node.args
    for left, right in zip(arguments, arguments[1:], strict=False):
        if (
            isinstance(left, ast.Name)
            and isinstance(right, ast.Name)
            and left.id != right.id
            and {left.id, right.id} != _SPREAD
        ):
            start, end = at(left.lineno, left.col_offset), at(right.end_lineno or 0, right.end_col_offset or 0)
            between = source[start + len(left.id) : end - len(right.id)]
            yield site("names", start, end, left, right.id + between + left.id)


def _name_of(node: ast.AST) -> str:
    """Name of a function that is defined or called."""
    if isinstance(node, ast.Call):
        return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    return node.name if isinstance(node, ast.FunctionDef) else ""


def _given(node: ast.AST) -> list[str]:
    """Names that a keyword or an assignment gives a value to."""
    if isinstance(node, ast.keyword):
        return [node.arg or ""]
    targets = [item for target in node.targets for item in ast.walk(target)] if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _undecided(tree: ast.AST) -> set[ast.AST]:
    """Comparisons whose outcome where both sides are equal changes nothing: of two values that are then equal one is
    taken, as in `where(x > 0, x, 0)`; or they guard a value that an outer `where` of the same condition, alone or with
    others, drops; or they ask whether any lane takes part in what is written for lanes that do not."""
    found = set[ast.AST]()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) or (isinstance(node, ast.While) and isinstance(node.test, ast.BinOp)):
            # A loop has another bound, or it would never end.
            found.update(part for part in _bounds(node.test) if _FLAGGED.fullmatch(ast.unparse(part)))
        if isinstance(node, ast.IfExp):
            condition, chosen, other = node.test, node.body, node.orelse
        elif isinstance(node, ast.Call) and _name_of(node) == "where" and len(node.args) == 3:
            condition, chosen, other = node.args
        else:
            continue
        taken = {_written(chosen), _written(other)}
        found.update(
            part for part in _bounds(condition) if {_written(part.left), _written(part.comparators[0])} == taken
        )
        within = [inner.args[0] for inner in ast.walk(chosen) if _name_of(inner) == "where"]
        asked = set(map(ast.dump, _joined(condition)))
        found.update(*(_bounds(guard) for guard in within if ast.dump(guard) in asked))
    return found


def _joined(condition: ast.AST) -> list[ast.AST]:
    """The conditions that `&` joins, or the one alone."""
    if isinstance(condition, ast.BinOp) and isinstance(condition.op, ast.BitAnd):
        return [*_joined(condition.left), *_joined(condition.right)]
    return [condition]


def _bounds(condition: ast.AST) -> list[ast.Compare]:
    """The comparisons by size in a condition."""
    parts = [part for part in ast.walk(condition) if isinstance(part, ast.Compare)]
    return [part for part in parts if not isinstance(part.ops[0], (ast.Eq, ast.NotEq))]


def _written(node: ast.expr) -> str:
    """The text of an expression; 0 and 0.0 are one number."""
    value = node.value if isinstance(node, ast.Constant) else None
    return str(float(value)) if isinstance(value, (int, float)) else ast.unparse(node)


def _is_one(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 1 and not isinstance(node.value, bool)


def _expressions(tree: ast.AST) -> Iterator[ast.expr]:
    """Expressions inside functions that decide something: no annotations, defaults, messages, assertions or tiles."""
    stack: list[tuple[ast.AST, bool]] = [(tree, False)]
    while stack:
        node, inside = stack.pop()
        if isinstance(node, (ast.Assert, ast.Raise, ast.JoinedStr)) or _name_of(node) == "static_assert":
            continue
        if isinstance(node, ast.If) and all(isinstance(child, ast.Raise) for child in node.body) and not node.orelse:
            continue  # what is refused has tests of its own, and often a second guard behind it
        if isinstance(node, ast.Compare) and any(_written(each) in _MACHINES for each in node.comparators):
            continue  # a machine has a GPU or none: the tests run one side
        if any(_TILES.fullmatch(name) for name in _given(node)):
            continue
        if _name_of(node) in _GUESSES or _TILES.fullmatch(_name_of(node)):
            continue
        if isinstance(node, ast.FunctionDef) and node.name in _ON_A_GPU:
            continue
        if isinstance(node, ast.Call) and _name_of(node) in _NOT_CALLED:
            continue
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            body: Sequence[ast.AST] = node.body if isinstance(node.body, list) else [node.body]
            stack += [(child, True) for child in body]
            continue
        if inside and isinstance(node, ast.expr):
            yield node
        stack += [(child, inside) for child in ast.iter_child_nodes(node)]
