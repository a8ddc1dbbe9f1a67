"""Bugs in the norms, the activation and the products of few rows."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import Mutant, parity

_NORM = "specdec_kernels/norm/kernel.py"
_ACTIVATION = "specdec_kernels/activation/kernel.py"
_PROJECTION = "specdec_kernels/projection/kernel.py"
_ARGMAX = "specdec_kernels/projection/kernel_argmax.py"
_CONFIGS = "specdec_kernels/projection/configs.py"
_TESTS = "tests/kernels/test_projection.py"
_case = partial(parity, "projection")

MUTANTS = (
    Mutant(
        "norm_divides_by_the_block",
        _NORM,
        "mean = tl.sum(wide * wide, 0) / D",
        "mean = tl.sum(wide * wide, 0) / wide.shape[0]",
        parity("norm", "norm_odd"),
        "the mean square of a width off the block counts the lanes past it",
    ),
    Mutant(
        "norm_of_an_unrounded_sum",
        _NORM,
        "x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)",
        "x = x.to(tl.float32) + residual.to(tl.float32)",
        ("tests/kernels/test_norm.py::test_the_sum_is_rounded_before_the_norm",),
        "the norm sees a residual stream that no later layer sees",
    ),
    Mutant(
        "norm_weight_before_the_rounding",
        _NORM,
        "scaled = (wide * (1.0 / tl.sqrt_rn(mean + eps))).to(x.dtype)",
        "scaled = wide * (1.0 / tl.sqrt_rn(mean + eps))",
        ("tests/kernels/test_norm.py::test_same_roundings_as_transformers",),
        "one rounding less than the checkpoints were trained and are compared with",
    ),
    Mutant(
        "embedding_of_any_token",
        _NORM,
        "x = tl.load(x_ptr + tl.where(known, token, 0) * D + dims, mask=inside & known, other=0.0)",
        "x = tl.load(x_ptr + token * D + dims, mask=inside, other=0.0)",
        parity("norm", "embed_outside"),
        "a token outside the table reads whatever lies there",
    ),
    Mutant(
        "gate_and_up_swapped",
        _ACTIVATION,
        "product = gated(gate.to(tl.float32), up.to(tl.float32), gate.dtype)",
        "product = gated(up.to(tl.float32), gate.to(tl.float32), gate.dtype)",
        parity("activation", "silu_odd"),
        "the halves of the packed projection are taken for each other",
    ),
    Mutant(
        "split_reads_past_its_end",
        _PROJECTION,
        "k_first = split * split_length\n    k_end = tl.minimum(K, k_first + split_length)",
        "k_first = split * split_length\n    k_end = K",
        _case("linear_small_down"),
        "inner elements of later splits are added twice",
    ),
    Mutant(
        "tail_of_the_inner_dimension_unmasked",
        _PROJECTION,
        "            inside = first + lane < k_end",
        "            inside = first + lane < k_end + BLOCK_K",
        _case("linear_odd"),
        "a step past the end of a row reads the row behind it",
    ),
    Mutant(
        "ticket_not_reset",
        _PROJECTION,
        "            tl.store(ticket_ptr + place, 0)",
        "            tl.store(ticket_ptr + place, 1)",
        (f"{_TESTS}::test_counters_are_zero_after_a_launch",),
        "the second replay of a graph takes the first program to arrive for the last",
    ),
    Mutant(
        "first_arrival_adds",
        _PROJECTION,
        'sem="acq_rel") == splits - 1',
        'sem="acq_rel") == 0',
        _case("linear_small_down"),
        "the sum is taken before all partial sums are written",
    ),
    Mutant(
        "last_part_left_out",
        _NORM,
        "for part in tl.range(1, num_parts):",
        "for part in tl.range(1, num_parts - 1):",
        _case("normed_splits"),
        "the norm behind a projection forgets a partial sum",
    ),
    Mutant(
        "gate_rows_of_a_full_tile",
        _PROJECTION,
        "row = tl.minimum(tile * HALF + lane % HALF, OUTER // 2 - 1) + (lane // HALF) * (OUTER // 2)",
        "row = tl.minimum(tile * HALF + lane // 2, OUTER // 2 - 1) + (lane % 2) * (OUTER // 2)",
        _case("gated_odd"),
        "gate and up rows alternate in a tile, and the epilogue splits it in halves",
    ),
    Mutant(
        "argmax_takes_the_last_tile",
        _ARGMAX,
        "lowest = tl.min(tl.where(best == top, column, _NO_COLUMN), 0)",
        "lowest = tl.max(tl.where(best == top, column, 0), 0)",
        (f"{_TESTS}::test_the_first_of_equal_columns_wins_across_tiles",),
        "among equal logits of two tiles the higher token wins, unlike in the acceptance kernels",
    ),
    Mutant(
        "columns_of_every_rank_from_0",
        _ARGMAX,
        "lowest = tl.min(tl.where(best == top, column, _NO_COLUMN), 0) + first_column",
        "lowest = tl.min(tl.where(best == top, column, _NO_COLUMN), 0)",
        _case("chosen_second_rank"),
        "the second rank names tokens of the first rank's part of the vocabulary",
    ),
    Mutant(
        "higher_of_equal_columns_over_ranks",
        _ARGMAX,
        "(other_column < column)",
        "(other_column > column)",
        _case("chosen_first_rank", "chosen_second_rank"),
        "the ranks agree on another token than one device would choose",
    ),
    Mutant(
        "cut_by_the_rows",
        _CONFIGS,
        "_programs_a_tile(_PROCESSORS[chip], tiles), inner",
        "_programs_a_tile(_PROCESSORS[chip], tiles) // block, inner",
        (f"{_TESTS}::test_the_cut_does_not_depend_on_the_rows",),
        "historical: a split chosen by the batch changes the bits of a row (cuBLAS at 16, 32 and 256 rows)",
    ),
    Mutant(
        "splits_added_from_the_second",
        _PROJECTION,
        "for later in tl.range(1, splits):",
        "for later in tl.range(2, splits):",
        (f"{_TESTS}::test_a_normed_row_has_the_same_bits_among_others",),
        "a program that takes all splits of its tile forgets one",
    ),
    Mutant(
        "tiles_cut_at_their_own_steps",
        _CONFIGS,
        "self.block_k == _CUT_STEP // 2 else self.block_k",
        "self.block_k == 0 else self.block_k",
        (f"{_TESTS}::test_the_cut_does_not_depend_on_the_rows",),
        "historical: five cuts of 4096 lie at other places in tiles of 64 inner elements than in tiles of 128",
    ),
    Mutant(
        "library_forgets_a_split",
        _PROJECTION,
        "for part in product[1:]:",
        "for part in product[2:]:",
        (f"{_TESTS}::test_the_library_stands_in_for_the_kernel",),
        "of a product that the library computes split by split, the second split is left out",
    ),
    Mutant(
        "head_by_the_rows",
        "algorithms/runtime/models/decoder.py",
        "return linear(hidden.contiguous(), head.weight, batch_invariant=self.batch_invariant, impl=self.impl)",
        "return linear(hidden.contiguous(), head.weight, impl=self.impl)",
        ("tests/runtime/test_deterministic.py::test_a_token_has_the_same_bits_wherever_it_is_computed",),
        "the logits of a long chunk come from another product than those of one token",
    ),
    Mutant(
        "captured_layer_is_normed",
        "algorithms/runtime/models/decoder.py",
        "outputs[index] = start.residual",
        "outputs[index] = start.normed",
        ("tests/runtime/test_fusion.py::test_both_forwards_agree[qwen3-reference]",),
        "drafters read the norm of the next layer instead of the residual stream",
    ),
    Mutant(
        "layer_ends_in_its_own_norm",
        "algorithms/runtime/models/decoder.py",
        "for layer in layers[1:]), norm]",
        "for layer in layers[:-1]), norm]",
        ("tests/runtime/test_fusion.py::test_both_forwards_agree[qwen3-reference]",),
        "the norm at the end of a layer has the weights of the layer itself",
    ),
    Mutant(
        "packed_in_another_order",
        "algorithms/runtime/models/decoder.py",
        "self._packed = self._packed or packed((self.gate_proj, self.up_proj))",
        "self._packed = self._packed or packed((self.up_proj, self.gate_proj))",
        ("tests/runtime/test_fusion.py::test_both_forwards_agree[qwen3-reference]",),
        "up lies where the kernel reads the gate",
    ),
)
