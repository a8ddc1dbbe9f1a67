"""Bugs in the norms, the activation and the products of few rows."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import bugs_in, parity

_norm = bugs_in("specdec_kernels/norm/kernel.py")
_activation = bugs_in("specdec_kernels/activation/kernel.py")
_projection = bugs_in("specdec_kernels/projection/kernel.py")
_device = bugs_in("specdec_kernels/projection/device.py")
_scaled = bugs_in("specdec_kernels/projection/kernel_scaled.py")
_rounding = bugs_in("specdec_kernels/projection/rounding.py")
_argmax = bugs_in("specdec_kernels/projection/kernel_argmax.py")
_configs = bugs_in("specdec_kernels/projection/configs.py")
_TESTS = "tests/kernels/test_projection.py"
_case = partial(parity, "projection")
_layers = bugs_in("algorithms/models/layers.py")
_decoder = bugs_in("algorithms/models/decoder.py")

MUTANTS = (
    _norm("norm_divides_by_the_block", "mean = tl.sum(wide * wide, 0) / {{D -> wide.shape[0]}}",
          parity("norm", "norm_odd"), "the mean square of a width off the block counts the lanes past it"),
    _norm("norm_of_an_unrounded_sum", "x = {{( -> }}x.to(tl.float32) + residual.to(tl.float32){{).to(x.dtype) -> }}",
          ("tests/kernels/test_norm.py::test_the_sum_is_rounded_before_the_norm",),
          "the norm sees a residual stream that no later layer sees"),
    _norm("norm_weight_before_the_rounding", "    if {{weight.dtype == x.dtype -> False}}:\n",
          ("tests/kernels/test_norm.py::test_same_roundings_as_transformers",),
          "one rounding less than the checkpoints were trained and are compared with"),
    _norm("embedding_of_any_token",
          "(first + {{tl.where(known, index, 0) -> index}}) * D + dims, mask=(dims < D){{ & known -> }}, other=0.0)",
          parity("norm", "embed_outside", "join_outside"), "a token outside the table reads whatever lies there"),
    _norm("features_of_the_first_request", "sources_ptr, row, {{row // columns * num_sources -> 0}}, num_sources",
          parity("norm", "join_sources"), "the tokens of every request continue the features of the first one"),
    _activation("gate_and_up_swapped",
                "product = gated({{gate.to(tl.float32), up -> up.to(tl.float32), gate}}.to(tl.float32), gate.dtype)",
                parity("activation", "silu_odd"), "the halves of the packed projection are taken for each other"),
    _scaled("scale_of_the_group_before", "group = tl.minimum({{first + TILE.BLOCK_K -> first}}, of.K - 1) // _GROUP",
            _case("scaled_576_rows"), "a group of the inner dimension has the scale of the one before it"),
    _scaled("scales_of_x_left_out", "if SCALING.FLOAT8_X:\n                part *= {{x_scale[None, :] -> 1.0}}",
            _case("float8_x_odd"), "sums of codes are not multiplied by the scales of x"),
    _rounding("codes_of_x_beyond_the_largest",
              "wide * tl.expand_dims(tl.div_rn({{_LARGEST -> 2 * _LARGEST}}, largest), AXIS)", _case("float8_x_splits"),
              "the largest numbers of a group are cut off"),
    _projection("split_reads_past_its_end",
                "k_first = split * split_length\n    k_end = {{tl.minimum(K, k_first + split_length) -> K}}",
                _case("linear_small_down"), "inner elements of later splits are added twice"),
    _projection("tail_of_the_inner_dimension_unmasked", "            inside = first + lane < k_end{{ ->  + BLOCK_K}}",
                _case("linear_odd"), "a step past the end of a row reads the row behind it"),
    _device("ticket_not_reset", "            tl.store(results.ticket + place, {{0 -> 1}})",
            (f"{_TESTS}::test_counters_are_zero_after_a_launch",),
            "the second replay of a graph takes the first program to arrive for the last"),
    _device("first_arrival_adds", 'sem="acq_rel") == {{splits - 1 -> 0}}', _case("linear_small_down"),
            "the sum is taken before all partial sums are written"),
    _norm("last_part_left_out", "for part in tl.range(1, num_parts{{ ->  - 1}}):", _case("normed_splits"),
          "the norm behind a projection forgets a partial sum"),
    _device("gate_rows_of_a_full_tile",
            "row = tl.minimum(tile * HALF + lane {{% HALF -> "
            "// 2}}, OUTER // 2 - 1) + (lane {{// HALF -> % 2}}) * (OUTER // 2)", _case("gated_odd"),
            "gate and up rows alternate in a tile, and the epilogue splits it in halves"),
    _argmax("argmax_takes_the_last_tile",
            "lowest = tl.{{min -> max}}(tl.where(best == top, column, {{_NO_COLUMN -> 0}}), 0)",
            (f"{_TESTS}::test_the_first_of_equal_columns_wins_across_tiles",),
            "among equal logits of two tiles the higher token wins, unlike in the acceptance kernels"),
    _argmax("columns_of_every_rank_from_0",
            "lowest = tl.min(tl.where(best == top, column, _NO_COLUMN), 0){{ + first_column -> }}",
            _case("chosen_second_rank"), "the second rank names tokens of the first rank's part of the vocabulary"),
    _argmax("higher_of_equal_columns_over_ranks", "(other_column {{< -> >}} column)",
            _case("chosen_first_rank", "chosen_second_rank"),
            "the ranks agree on another token than one device would choose"),
    _configs("cut_by_the_rows", "_programs_a_tile(chip, tiles, inner){{ ->  // block}}, inner",
             (f"{_TESTS}::test_the_cut_does_not_depend_on_the_rows",),
             "historical: a split chosen by the batch changes the bits of a row (cuBLAS at 16, 32 and 256 rows)"),
    _projection("splits_added_from_the_second", "for later in tl.range({{1 -> 2}}, splits):",
                (f"{_TESTS}::test_a_normed_row_has_the_same_bits_among_others",),
                "a program that takes all splits of its tile forgets one"),
    _configs("tiles_cut_at_their_own_steps", "self.block_k == {{_CUT_STEP // 2 -> 0}} else self.block_k",
             (f"{_TESTS}::test_the_cut_does_not_depend_on_the_rows",),
             "historical: five cuts of 4096 lie at other places in tiles of 64 inner elements than in tiles of 128"),
    _projection("library_forgets_a_split", "for part in product[{{1 -> 2}}:]:",
                (f"{_TESTS}::test_the_library_stands_in_for_the_kernel",),
                "of a product that the library computes split by split, the second split is left out"),
    _decoder(
        "head_by_the_rows",
        "return kernels.linear(\n"
        "                hidden.contiguous(), head.weight{{, batch_invariant=self.batch_invariant -> }}",
        (
            "tests/algorithms/step/test_deterministic.py::test_a_token_has_the_same_bits_wherever_it_is_computed[attention]",
        ),
        "the logits of a long chunk come from another product than those of one token",
    ),
    _decoder("captured_layer_is_normed", "outputs[index] = start.{{residual -> normed}}",
             ("tests/algorithms/models/test_fusion.py::test_both_forwards_agree[qwen3-reference]",),
             "drafters read the norm of the next layer instead of the residual stream"),
    _decoder("layer_ends_in_its_own_norm", "for layer in layers[{{1: -> :-1}}]), norm]",
             ("tests/algorithms/models/test_fusion.py::test_both_forwards_agree[qwen3-reference]",),
             "the norm at the end of a layer has the weights of the layer itself"),
    _layers("packed_in_another_order",
            "self._packed = self._packed or packed((self.{{gate_proj, self.up_proj -> up_proj, self.gate_proj}}))",
            ("tests/algorithms/models/test_fusion.py::test_both_forwards_agree[qwen3-reference]",),
            "up lies where the kernel reads the gate"),
)  # fmt: skip
