"""Bugs in latent attention."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import bugs_in, parity

_kernel = bugs_in("specdec_kernels/mla/kernel.py")
_heads = bugs_in("specdec_kernels/mla/kernel_heads.py")
_memory = bugs_in("algorithms/models/latent/memory.py")
_write = bugs_in("specdec_kernels/mla/kernel_write.py")
_case = partial(parity, "mla")
_TURNS = ("tests/kernels/test_mla.py::test_requests_in_turns_have_the_same_bits",)

MUTANTS = (
    _write("latent_store_past_the_cache", "kept = here & (slot >= 0){{ & (slot < num_slots) -> }}",
           _case("write_skipped"), "a slot past the cache is written"),
    _write("latent_position_after_the_table",
           "known = here & (position >= 0){{ & (position < max_pos) -> "
           "\n    position = tl.minimum(position, max_pos - 1)}}",
           _case("write_odd"), "a position after the table rotates as the last one"),
    _write("latent_neighbours_as_halves", "SECOND: tl.constexpr = {{1 if INTERLEAVED else HALF -> HALF}}",
           _case("write_interleaved"), "interleaved pairs are read as halves"),
    _write("latent_norm_over_the_whole_row", "tl.sum(latent * latent, 1) / {{L -> (L + 2 * HALF)}} + eps",
           _case("write_odd"), "the mean of squares counts the shared key"),
    _kernel("mla_rope_left_out", 'scores = {{ -> 0.0 * }}tl.dot(q_r, tl.trans(rope), input_precision="ieee")',
            _case("chain_odd"), "scores without the rotary part of the key"),
    _kernel("mla_turns_of_the_first_requests", "call.of_requests({{part -> slice(0, part.stop - part.start)}})",
            _TURNS, "of requests that run in turns the first are computed again"),
    _kernel("mla_turns_overwrite_lse", "None if lse is None else lse[{{part -> : part.stop - part.start}}])", _TURNS,
            "every turn writes the log-sum-exps of the first"),
    _kernel("mla_dropped_split", "if split{{ ->  + 1}} >= num_live:", _case("splits"),
            "the last split never reaches the merge"),
    _kernel("mla_keys_of_the_next_split", "free_end = tl.minimum(free_end, {{end -> tile_end}})", _case("splits"),
            "the last tile of a split counts keys of the next"),
    _heads("head_rows_for_columns", "weight = tl.load(weight_row + k[:, None] * {{W_ROW -> 1}}, mask",
           _case("heads_odd"), "the rows of a head's matrix are taken for adjacent"),
    _memory(
        "latent_path_without_its_end",
        "lengths=(metadata.lengths[:, None] + (depth - {{1 -> 2}}).clamp(min=0)).flatten(),",
        (
            "tests/algorithms/step/test_deterministic.py::test_a_token_has_the_same_bits_wherever_it_is_computed[latent]",
        ),
        "a node of a tree does not see itself",
    ),
    _kernel("mla_row_of_the_other_head", "    nodes = rows {{// -> %}} HEADS\n", _case("chain_odd"),
            "rows are unpacked head first"),
    _kernel("mla_rest_of_the_latent_unscaled",
            'acc_b = tl.dot(weights, latent_b, acc_b{{ * decay[:, None] -> }}, input_precision="ieee")',
            ("tests/kernels/test_small_tiles.py::test_a_latent_in_two_blocks_over_several_tiles",),
            "the second accumulator is not rescaled when the maximum rises"),
)  # fmt: skip
