"""Bugs in linear attention with the gated delta rule."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import bugs_in, parity

_kernel = bugs_in("specdec_kernels/linear_attention/kernel.py")
_device = bugs_in("specdec_kernels/linear_attention/device.py")
_tree = bugs_in("specdec_kernels/linear_attention/kernel_tree.py")
_paths = bugs_in("specdec_kernels/linear_attention/paths.py")
_case = partial(parity, "linear_attention")
_BITS = ("tests/kernels/test_linear_attention.py::test_any_way_through_a_text_has_the_same_bits",)

MUTANTS = (
    _kernel("delta_convolution_of_another_place", "place = slot * (TAPS - 1) + (TAPS - 1 - {{before -> tap}})",
            _case("inputs_chain"), "the state's inputs are counted from the row in place of the first row of the call"),
    _kernel("delta_softplus_ends_at_its_threshold",
            "return {{tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0)))) -> "
            "tl.log(1.0 + tl.exp(tl.minimum(x, 20.0)))}}",
            _case("inputs_steep"), "a state decays no faster than with a step of 20"),
    _kernel("delta_rows_of_one_stride", "a = tl.load(a_ptr + row * {{a_stride -> b_stride}} + value",
            _case("inputs_prompt"), "decays are read at the stride of the write strengths"),
    _kernel("delta_difference_before_the_decay",
            "update = beta * (v - tl.sum({{state -> state / decay}} * k[:, None], 0))", _case("rule_chain"),
            "the value is compared with the state before its decay"),
    _kernel("delta_key_of_the_value_head", "query = head {{// (S.HV // S.H) -> % S.H}} * S.DK + key",
            _case("rule_chain"), "value heads take the keys of the wrong group"),
    _kernel("delta_segment_does_not_reset", "{{if (count == 0) & ((end < 0) | (end == start)) -> if count == 0}}:",
            _case("rule_prompt"), "a text of one token starts from the state of an old request"),
    _kernel("delta_inputs_before_the_path_stay", "(start * (TAPS - 1) + place{{ + count -> }}) * C, mask=old",
            _case("commit_tree"), "after a path shorter than the convolution its older inputs do not move"),
    _kernel("delta_gate_before_the_norm", "wide = x.to(tl.float32){{ -> * (gate * tl.sigmoid(gate))}}",
            _case("norm_odd"), "the gate is applied before the norm too"),
    _tree("delta_tree_sees_all_before", "sees = ((bit != 0) {{& -> |}} (i[:, None] > i[None, :]))", _case("tree_15"),
          "a node of a tree sees other branches"),
    _device("delta_decay_of_what_both_see", "tl.where(sees, {{0.0, 1.0 -> 1.0, 0.0}})", _case("tree_15"),
            "what a node sees decays by the gates before it in place of those behind it"),
    _device("delta_halves_are_not_merged", "below = tl.where(second, below[None, :, None, :]{{ -> * 0.0}}, 0.0)",
            _case("tree_63"), "the inverse of a large tree lacks the block below its halves"),
    _paths("delta_texts_start_from_their_slot", "begins = torch.where(starts == {{0 -> -1}}, -1, slots)", _BITS,
           "a new request starts from what an old one left"),
    _paths("delta_parent_is_the_row_before",
           "parent = {{nodes.gather(2, (depth - 2).clamp(min=0))[:, :, 0] -> (node - 1).expand(batch, count)}}", _BITS,
           "the convolution of a tree sees other branches"),
)  # fmt: skip
