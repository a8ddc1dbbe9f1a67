"""Bugs in paged attention: masks, windows, splits and their merge, and the work list."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import Mutant, parity

_KERNEL = "specdec_kernels/attention/kernel.py"
_DEVICE = "specdec_kernels/attention/device.py"
_TREE = "specdec_kernels/attention/kernel_tree.py"
_PLAN = "specdec_kernels/attention/kernel_plan.py"
_INVARIANT = "tests/kernels/test_batch_invariance.py"
_case = partial(parity, "attention")

MUTANTS = (
    Mutant(
        "no_mask_at_the_tile_edge",
        _KERNEL,
        "masked = start + BLOCK_N > free_end",
        "masked = start > free_end",
        _case("tree_odd"),
        "a tile that holds both prefix and draft keys is not masked",
    ),
    Mutant(
        "chain_sees_one_ahead",
        _DEVICE,
        "return positions[None, :] <= tl.minimum(length + nodes, end - 1)[:, None]",
        "return positions[None, :] <= tl.minimum(length + nodes + 1, end - 1)[:, None]",
        _case("chain_odd"),
        "the causal mask is off by one",
    ),
    Mutant(
        "causal_end_too_early",
        _DEVICE,
        "tile_end = tl.minimum(end, length + last_node + 1)",
        "tile_end = tl.minimum(end, length + last_node)",
        _case("gqa_2"),
        "the last row of a tile never sees itself",
    ),
    Mutant(
        "second_mask_word_ignored",
        _DEVICE,
        "bits = tl.load(row_words + word, mask=nodes < used, other=0)[:, None]",
        "bits = tl.load(row_words, mask=nodes < used, other=0)[:, None]",
        _case("tree_65"),
        "nodes from 64 on are judged by the bits of the first word",
    ),
    Mutant(
        "mask_row_of_the_first_request",
        _KERNEL,
        "mask_row = mask_ptr + request * num_nodes * WORDS",
        "mask_row = mask_ptr + request * 0",
        _case("tree_odd"),
        "every request uses the tree of the first",
    ),
    Mutant(
        "gqa_head_mapping",
        _KERNEL,
        "out_rows = (request * num_nodes + nodes) * (H_KV * GROUP) + kv_head * GROUP + rows % GROUP",
        "out_rows = (request * num_nodes + nodes) * (H_KV * GROUP) + kv_head + rows % GROUP * H_KV",
        _case("gqa_2"),
        "query heads are dealt out to KV heads in turn instead of in groups",
    ),
    Mutant(
        "page_of_the_wrong_tile",
        _KERNEL,
        "pages = page_ids(table_row, positions + BLOCK_N, stop, PAGE)",
        "pages = page_ids(table_row, positions, stop, PAGE)",
        _case("window_off_tile"),
        "page numbers loaded ahead are those of the tile before",
    ),
    Mutant(
        "pool_offset_in_32_bits",
        _KERNEL,
        "offsets = (pages.to(tl.int64) * PAGE + positions % PAGE)[:, None] * (H_KV * D) + dims[None, :]",
        "offsets = (pages * PAGE + positions % PAGE)[:, None] * (H_KV * D) + dims[None, :]",
        ("tests/kernels/test_large_offsets.py::test_attention_reads_beyond_32_bit_offsets",),
        "an element offset in a large pool wraps around 2^31",
    ),
    Mutant(
        "window_by_slot",
        _DEVICE,
        "return length + tl.where(depth < 0, deepest, depth)",
        "return length + tl.minimum(nodes, used - 1)",
        _case("window_tree"),
        "historical: a window over a tree counts slots instead of depth (SGLang #39287)",
    ),
    Mutant(
        "window_keys_by_slot",
        _DEVICE,
        "return tl.where(drafted, length + depth, positions)",
        "return positions",
        _case("window_in_tree"),
        "a window over a tree looks for ancestors at their slots instead of their depth",
    ),
    Mutant(
        "window_one_too_wide",
        _KERNEL,
        "seen = seen & (row_position[:, None] - key_position[None, :] < window)",
        "seen = seen & (row_position[:, None] - key_position[None, :] <= window)",
        _case("window_one"),
        "a row sees one key more than its window",
    ),
    Mutant(
        "window_starts_a_tile_late",
        _KERNEL,
        "begin += tl.maximum(lowest - begin, 0) // BLOCK_N * BLOCK_N",
        "begin += (tl.maximum(lowest - begin, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N",
        _case("window_off_tile"),
        "the tile in which a window begins is left out",
    ),
    Mutant(
        "dropped_split",
        _DEVICE,
        "parts[step].to(tl.float32), lses[step])",
        'parts[step].to(tl.float32), tl.where(first + step + 1 < count, lses[step], float("-inf")))',
        _case("splits_grow"),
        "the merge leaves out the last split",
    ),
    Mutant(
        "merge_without_rescaling",
        _DEVICE,
        "acc = tl.fma(part, weight[:, None], acc * decay[:, None])",
        "acc = tl.fma(part, weight[:, None], acc)",
        ("tests/kernels/test_small_tiles.py::test_merge_rescales_between_chunks",),
        "the scale of splits merged earlier is not corrected when the maximum rises",
    ),
    Mutant(
        "merge_of_natural_and_base_2",
        _DEVICE,
        "weight = tl.exp2(lse - finite_or_zero(new_top))",
        "weight = tl.exp(lse - finite_or_zero(new_top))",
        _case("splits_chain"),
        "partial log-sum-exps in base 2 are merged with the natural exponential",
    ),
    Mutant(
        "lse_in_base_2",
        _KERNEL,
        "lse = log2_sum(top, total) * LN_2",
        "lse = log2_sum(top, total)",
        _case("chain_odd"),
        "the log-sum-exp is returned in base 2",
    ),
    Mutant(
        "sink_once_a_split",
        _DEVICE,
        "return acc * decay[:, None], new_top, total * decay + tl.exp2(sink - finite_or_zero(new_top))",
        "return acc * decay[:, None], new_top, total * decay + 2 * tl.exp2(sink - finite_or_zero(new_top))",
        _case("sinks_split"),
        "a sink is counted twice",
    ),
    Mutant(
        "unused_rows_not_zeroed",
        _KERNEL,
        "        total = tl.where(nodes < used, total, 0.0)\n        out = acc",
        "        out = acc",
        _case("q_lens"),
        "rows past q_lens carry numbers",
    ),
    Mutant(
        "slots_counted_as_rows",
        _DEVICE,
        "end = tl.minimum(length + num_slots, max_length)",
        "end = tl.minimum(length + used, max_length)",
        _case("wide_tree"),
        "a drafter's expansion step sees only as many slots as it has rows",
    ),
    Mutant(
        "branch_taken_for_the_text",
        _TREE,
        "held = tl.where(depth < 0, positions, length + slot)",
        "held = positions",
        (f"{_INVARIANT}::test_a_node_of_a_tree_has_the_bits_of_the_prompt[plain-False]",),
        "a node of a tree sees the keys of the slots behind the prefix instead of those of its own text",
    ),
    Mutant(
        "split_of_the_prefix_not_closed",
        _TREE,
        "(start + BLOCK_N == split_end) | (start + BLOCK_N >= end)",
        "start + BLOCK_N >= end",
        (f"{_INVARIANT}::test_a_node_of_a_tree_has_the_bits_of_the_prompt[plain-False]",),
        "drafts behind a border of splits are added to the split before it",
    ),
    Mutant(
        "splits_of_the_walk_at_other_positions",
        _KERNEL,
        "split_stop = tl.minimum(stop, fixed_split_begin(split + 1, split_tokens, first_splits))",
        "split_stop = stop",
        (f"{_INVARIANT}::test_a_prompt_has_the_same_bits_in_one_piece_and_in_several[plain]",),
        "historical: a prompt is not cut where decoding cuts it, and differs in its last bits",
    ),
    Mutant(
        "plan_of_the_next_request",
        _PLAN,
        "start = tl.sum(tl.where(requests < own, items, 0), 0)",
        "start = tl.sum(tl.where(requests <= own, items, 0), 0)",
        _case("plan_unequal"),
        "the items of a request are written where those of the next belong",
    ),
    Mutant(
        "key_scale_of_the_first_head",
        _KERNEL,
        "score_scale *= tl.load(k_scale_ptr + kv_head)",
        "score_scale *= tl.load(k_scale_ptr)",
        _case("fp8_scales"),
        "all heads of an fp8 pool use the scale of the first",
    ),
)
