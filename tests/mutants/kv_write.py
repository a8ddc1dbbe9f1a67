"""Bugs in the fused norm, rotation and paged store."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import bugs_in, parity

_kernel = bugs_in("specdec_kernels/kv_write/kernel.py")
_case = partial(parity, "kv_write")

MUTANTS = (
    _kernel("rope_position_off_by_one",
            "row = rope_ptr + {{ -> tl.minimum(}}tl.where(known, position, 0{{ -> ) + 1, max_pos - 1}})[:, None] "
            "* (2 * HALF)", _case("write_odd"), "keys are rotated by the angle of the next position"),
    _kernel("rope_turned_back",
            "turned, other = first * cos {{- -> +}} second * sin, second * cos {{+ -> -}} first * sin",
            ("tests/kernels/test_kv_write.py::test_same_as_transformers",),
            "the rotation has the wrong sign; scores alone cannot tell when q and k share the fault"),
    _kernel("interleaved_taken_for_halves",
            "    if {{INTERLEAVED -> False}}:\n        both = _load_part(head_ptr, mask, 0, 2 * HALF, 2 * HALF_BLOCK)",
            ("tests/kernels/test_kv_write.py::test_neighbours_turn_as_in_transformers",),
            "neighbouring elements are to turn together, and halves do"),
    _kernel("k_norm_of_layer_0", "k_norm_ptr + layer * {{D -> 0}}", _case("materialize_odd"),
            "every layer of a drafter is normalised by the weights of the first"),
    _kernel("skipped_slot_wraps",
            "        placed = here & {{(slot >= 0) & (slot < num_slots)\n"
            "        kv_row = ((layer * 2 + is_v) * num_slots + tl.where(placed, slot, 0)) -> (slot < num_slots)\n"
            "        slot = tl.where(slot < 0, slot + num_slots, slot)\n"
            "        kv_row = ((layer * 2 + is_v) * num_slots + slot)}} * H_KV\n", _case("write_none_stored"),
            "historical: slot -1 of a padded row lands on the last page (vLLM #43682)"),
    _kernel("norm_over_one_half",
            "total = {{tl.sum(first * first, 2) + tl.sum(second * second, 2) -> 2 * tl.sum(first * first, 2)}}",
            _case("write_odd"), "the mean square forgets half of the head"),
    _kernel("e4m3_rounds_half_up", "normal = ((bits + {{0x7FFFF + ((bits >> 20) & 1) -> 0x80000}}) >> 20) - (120 << 3)",
            ("tests/kernels/test_kv_write.py::test_e4m3_codes_are_the_nearest_even_ones",),
            "codes halfway between two numbers are rounded up instead of to even"),
    bugs_in("specdec_kernels/kv_write/rope.py")(
        "yarn_ramp_past_the_last_pair",
        "min(high, rotary_dim{{ - 1 -> }})",
        ("tests/algorithms/models/test_architectures.py::test_architectures_agree_with_transformers",),
        "the ramp of YaRN ends one pair later than in transformers where the base is small",
    ),
)  # fmt: skip
