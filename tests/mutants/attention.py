"""Bugs in paged attention: masks, windows, splits and their merge, and the tile schedule."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import bugs_in, parity

_kernel = bugs_in("specdec_kernels/attention/kernel.py")
_device = bugs_in("specdec_kernels/attention/device.py")
_fp8 = bugs_in("specdec_kernels/attention/device_fp8.py")
_tree = bugs_in("specdec_kernels/attention/kernel_tree.py")
_plan = bugs_in("specdec_kernels/attention/kernel_plan.py")
_INVARIANT = "tests/kernels/test_batch_invariance.py"
_case = partial(parity, "attention")

MUTANTS = (
    _kernel("no_mask_at_the_tile_edge", "masked = start {{+ BLOCK_N  -> }}> free_end", _case("tree_odd"),
            "a tile that holds both prefix and draft keys is not masked"),
    _device("chain_sees_one_ahead",
            "return positions[None, :] <= tl.minimum(length + nodes{{ ->  + 1}}, end - 1)[:, None]", _case("chain_odd"),
            "the causal mask is off by one"),
    _device("causal_end_too_early", "tile_end = tl.minimum(end, length + last_node{{ + 1 -> }})", _case("gqa_2"),
            "the last row of a tile never sees itself"),
    _device("second_mask_word_ignored", "bits = tl.load(row_words{{ + word -> }}, mask=nodes < used, other=0)[:, None]",
            _case("tree_65"), "nodes from 64 on are judged by the bits of the first word"),
    _kernel("mask_row_of_the_first_request", "mask_row = call.of.mask + request * {{num_nodes * STATIC.WORDS -> 0}}",
            _case("tree_odd"), "every request uses the tree of the first"),
    _kernel("gqa_head_mapping",
            "out_rows = (request * num_nodes + nodes) * ROW_HEADS + item.kv_head {{* GROUP  -> "
            "}}+ rows % GROUP{{ ->  * STATIC.H_KV}}", _case("gqa_2"),
            "query heads are dealt out to KV heads in turn instead of in groups"),
    _kernel("page_of_the_wrong_tile", "pages = d.page_ids(pool.table_row, positions{{ + BLOCK_N -> }}, stop, PAGE)",
            _case("window_off_tile"), "page numbers loaded ahead are those of the tile before"),
    _kernel(
        "pool_offset_in_32_bits",
        "offsets = (pages{{.to(tl.int64) -> }} * PAGE + positions % PAGE)[:, None] * (STATIC.H_KV * D) + dims[None, :]",
        ("tests/kernels/test_large_offsets.py::test_attention_reads_beyond_32_bit_offsets",),
        "an element offset in a large pool wraps around 2^31",
    ),
    _device("window_by_slot", "return length + tl.{{where(depth < 0, deepest, depth) -> minimum(nodes, used - 1)}}",
            _case("window_tree"), "historical: a window over a tree counts slots instead of depth (SGLang #39287)"),
    _device("window_keys_by_slot", "return {{tl.where(drafted, length + depth, positions) -> positions}}",
            _case("window_in_tree"), "a window over a tree looks for ancestors at their slots instead of their depth"),
    _device("window_one_too_wide",
            "seen = seen & (view.row_position[:, None] - key_position[None, :] {{< -> <=}} view.window)",
            _case("window_one"), "a row sees one key more than its window"),
    _device("window_starts_a_tile_late",
            "return begin + {{ -> (}}tl.maximum(lowest - begin, 0) {{ -> + BLOCK_N - 1) }}// BLOCK_N * BLOCK_N,",
            _case("window_off_tile"), "the tile in which a window begins is left out"),
    bugs_in("specdec_kernels/attention/kernel_merge.py")(
        "dropped_split",
        'parts[step].to(tl.float32), {{ -> tl.where(first + step + 1 < live, }}lses[step]{{) -> , float("-inf")))}}',
        _case("splits_grow"),
        "the merge leaves out the last split",
    ),
    _device("merge_without_rescaling", "acc = tl.fma(part, weight[:, None], acc{{ * decay[:, None] -> }})",
            ("tests/kernels/test_small_tiles.py::test_merge_rescales_between_chunks",),
            "the scale of splits merged earlier is not corrected when the maximum rises"),
    _device("merge_of_natural_and_base_2", "weight = tl.{{exp2 -> exp}}(lse - finite_or_zero(new_top))",
            _case("splits_chain"), "partial log-sum-exps in base 2 are merged with the natural exponential"),
    _kernel("lse_in_base_2", "lse = d.log2_sum(top, total){{ * d.LN_2 -> }}", _case("chain_odd"),
            "the log-sum-exp is returned in base 2"),
    _device("sink_once_a_split",
            "return acc * decay[:, None], new_top, total * decay + {{ -> 2 * }}tl.exp2(sink - finite_or_zero(new_top))",
            _case("sinks_split"), "a sink is counted twice"),
    _kernel("unused_rows_not_zeroed", "        {{total = tl.where(nodes < used, total, 0.0)\n         -> }}out = acc",
            _case("q_lens"), "rows past q_lens carry numbers"),
    _device("slots_counted_as_rows", "end = tl.minimum(length + {{num_slots -> used}}, max_length)", _case("wide_tree"),
            "a drafter's expansion step sees only as many slots as it has rows"),
    _tree("branch_taken_for_the_text", "held = {{tl.where(depth < 0, positions, length + slot) -> positions}}",
          (f"{_INVARIANT}::test_a_node_of_a_tree_has_the_bits_of_the_prompt[plain-False]",),
          "a node of a tree sees the keys of the slots behind the prefix instead of those of its own text"),
    _tree("split_of_the_prefix_not_closed",
          "{{(start + BLOCK_N == split_end) | (start + BLOCK_N >= end) -> start + BLOCK_N >= end}}",
          (f"{_INVARIANT}::test_a_node_of_a_tree_has_the_bits_of_the_prompt[plain-False]",),
          "drafts behind a border of splits are added to the split before it"),
    _tree("last_half_keeps_the_old_maximum",
          "last = sums.last * {{tl.exp2(sums.top - d.finite_or_zero(top))[:, None] -> 1.0}}",
          (f"{_INVARIANT}::test_a_node_of_a_tree_has_the_bits_of_the_prompt[plain-False]",),
          "half of a head's numbers are not rescaled where a draft has the largest score"),
    _kernel(
        "splits_of_the_walk_at_other_positions",
        "split_stop = {{tl.minimum(stop, d.fixed_split_begin(split + 1, splits.split_tokens, splits.first_splits)) -> "
        "stop}}",
        (f"{_INVARIANT}::test_a_prompt_has_the_same_bits_in_one_piece_and_in_several[plain]",),
        "historical: a prompt is not cut where decoding cuts it, and differs in its last bits",
    ),
    _device(
        "a_draft_adds_a_round_of_splits",
        "rounds = (span // splits.first_splits + splits.longest_split {{// 2 -> - 1}}) // splits.longest_split",
        _case("plan_rounds"),
        "historical: a prompt of 2^n tokens and its draft are cut into half as many splits again, in rounds half empty",
    ),
    _fp8("exponent_of_odd_codes", "odd = (bits & 0x8000) | ((bits & {{0x7F00 -> 0x3F00}}) >> 1)", _case("fp8_rows"),
         "odd dimensions of large keys and values are read too small"),
    _kernel("keys_of_the_next_split", "free_end = {{tl.minimum(free_end, stop) -> free_end}}",
            ("tests/kernels/test_attention_plan.py::test_splits_at_the_bound_of_memory[False]",),
            "the last tile of a split that is no whole number of tiles counts keys of the next split"),
    _plan("plan_of_the_next_request", "start = tl.sum(tl.where(requests {{< -> <=}} own, items, 0), 0)",
          _case("plan_unequal"), "the items of a request are written where those of the next belong"),
    _kernel("key_scale_of_the_first_head", "score_scale *= tl.load(call.of.k_scale{{ + item.kv_head -> }})",
            _case("fp8_scales"), "all heads of an fp8 pool use the scale of the first"),
)  # fmt: skip
