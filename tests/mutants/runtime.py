"""Bugs around the kernels: where they run, and what is handed to them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_FAULTS = "tests/algorithms/test_faults.py::"
_SCHEDULER = "tests/algorithms/test_scheduler.py::"
_DRAFTERS = "tests/algorithms/test_drafters.py::"
_DFLASH = "algorithms/dflash.py"

MUTANTS = (
    Mutant(
        "launch_on_the_current_gpu",
        "specdec_kernels/launch.py",
        "    with _on_device_of(args):\n",
        "    with nullcontext():\n",
        ("tests/kernels/test_launch.py::test_a_launch_goes_to_the_gpu_of_its_tensors",),
        "historical: tensors of the second GPU, a launch on the first",
    ),
    Mutant(
        "levels_read_slots_of_later_levels",
        "algorithms/runtime/paged_attention.py",
        "tree_width=first + (level + 1) * width)",
        "tree_width=first + min(level + 2, count) * width)",
        (_FAULTS + "test_nothing_is_read_before_it_is_written[fa4-standalone_tree]",),
        "historical: a level reads the slots that the next one writes, and NaN in them reaches every output",
    ),
    Mutant(
        "stop_strings_of_three_tokens",
        "algorithms/runtime/scheduler.py",
        "text = self._decode([*written, *emitted[:index]])",
        "text = self._decode([*written, *emitted[:index]][-3:])",
        (_SCHEDULER + "test_stop_strings_may_span_any_number_of_tokens_and_steps",),
        "a stop string of more than three tokens is not seen",
    ),
    Mutant(
        "keys_of_drawn_drafts_repeat",
        "algorithms/runtime/drawn_tree.py",
        "sampling.temperature, sampling.seeds, batch.lengths,",
        "sampling.temperature, sampling.seeds, batch.lengths // 2,",
        (_FAULTS + "test_drawn_drafts_never_use_a_key_twice",),
        "a draft of this step and one of the next are drawn by one uniform",
    ),
    Mutant(
        "own_bit_of_a_wide_tree_in_the_first_word",
        "specdec_kernels/tree/reference.py",
        "word == (own // WORD_BITS)[:, None]",
        "word == 0 * own[:, None]",
        (_DRAFTERS + "test_tokens_of_wide_trees_see_their_paths_alone",),
        "a node at draft slot 64 or above does not see itself",
    ),
    Mutant(
        "one_token_prompts_inherit_a_feature",
        "algorithms/runtime/batch.py",
        "torch.where((prompts.counts > 0)[:, None], last, 0.0)",
        "torch.where((prompts.counts > 0)[:, None], last, self._rows[prompts.rows])",
        (_FAULTS + "test_a_row_forgets_the_request_before[eagle_chain]",),
        "a prompt of one token is drafted from the feature that another request left in its row",
    ),
    Mutant(
        "the_window_of_the_run_replaces_nothing",
        _DFLASH,
        "for window in (config.decoder.window(layer), self._window) if",
        "for window in (config.decoder.window(layer),) if",
        (_DRAFTERS + "test_dflash_drafts_what_its_layers_say",),
        "algo.window is ignored",
    ),
    Mutant(
        "the_wider_window_wins",
        _DFLASH,
        "min(windows, default=None)",
        "max(windows, default=None)",
        (_DRAFTERS + "test_dflash_drafts_what_its_layers_say",),
        "of the window of the run and that of the layer the wider one is taken",
    ),
    Mutant(
        "the_last_layer_before_the_norm",
        "algorithms/runtime/models/drafters/dflash.py",
        "[hidden if index == last else feature for",
        "[feature for",
        (_DRAFTERS + "test_dflash_drafts_what_its_layers_say",),
        "a drafter that reads the target's last layer gets the stream in front of the final norm",
    ),
    Mutant(
        "padding_rows_move_keys",
        "algorithms/runtime/step.py",
        "committed.start, committed.nodes, impl=impl)",
        "committed.start, self.accepted.nodes, impl=impl)",
        (_FAULTS + "test_a_padding_row_moves_nothing",),
        "a padding row of a captured step moves keys and values in pages that it no longer owns",
    ),
    Mutant(
        "min_p_before_temperature",
        "specdec_kernels/sampling/reference.py",
        "top + divisor[:, 0] * share.log()",
        "top + share.log()",
        ("tests/kernels/test_sampling_filters.py::test_min_p_is_measured_at_the_temperature[2.0-reference]",),
        "min-p is measured on the distribution at temperature 1",
    ),
    Mutant(
        "min_p_before_temperature_in_the_kernel",
        "specdec_kernels/sampling/kernel_filter.py",
        "tl.log2(least) / scale",
        "tl.log2(least) / 1.4426950408889634",
        ("tests/kernels/test_sampling_filters.py::test_min_p_is_measured_at_the_temperature[2.0-triton]",),
        "min-p is measured on the distribution at temperature 1",
    ),
    Mutant(
        "heads_of_any_size",
        "specdec_kernels/attention/types.py",
        "if self.head_dim % 16 or not 16 <= self.head_dim <= MAX_HEAD_DIM:",
        "if self.head_dim > MAX_HEAD_DIM:",
        ("tests/experiments/test_plan.py::test_head_dimensions_are_checked_before_weights_load",),
        "historical: a head dimension of 24 ends in a traceback at the first prefill",
    ),
    Mutant(
        "norm_output_is_ignored",
        "algorithms/runtime/models/drafters/eagle.py",
        "self.norm(hidden) if is_raw else hidden",
        "self.norm(hidden)",
        ("tests/runtime/test_eagle.py::test_eagle3_agrees_with_its_definition[False-False]",),
        "historical: a head without the norm before its LM head drafts other tokens",
    ),
    Mutant(
        "fc_norm_is_ignored",
        "algorithms/runtime/models/drafters/eagle.py",
        "features = [norm(feature) for norm, feature in zip(self.fc_norm, features, strict=True)]",
        "features = list(features)",
        ("tests/runtime/test_eagle.py::test_eagle3_agrees_with_its_definition[True-True]",),
        "historical: vLLM created the norms of EAGLE-3.1 for one kind of head, and never applied them (its PR 43482)",
    ),
    Mutant(
        "a_chunk_keeps_the_text_of_the_one_before",
        "algorithms/runtime/chunk.py",
        "            arrays[name].fill(0)\n",
        "            arrays[name][:1].fill(0)\n",
        ("tests/algorithms/test_prefill.py::test_padding_holds_nothing_of_an_earlier_chunk",),
        "tiles of padding that hold what an earlier chunk sent",
    ),
    Mutant(
        "last_token_of_a_prompt_in_its_first_tile",
        "algorithms/runtime/chunk.py",
        "first_tile * self.tile + max(0, count - 1)",
        "first_tile * self.tile + min(self.tile, max(1, count)) - 1",
        ("tests/algorithms/test_prefill.py::test_drafts_do_not_depend_on_the_cut[eagle3_chain]",),
        "what a drafter keeps of a prompt is taken from its first tile",
    ),
)
