"""Bugs around the kernels: where they run, and what is handed to them."""

from __future__ import annotations

from tests.mutants.mutant import bugs_in

_FAULTS = "tests/algorithms/test_faults.py::"
_SCHEDULER = "tests/algorithms/engine/test_scheduler.py::"
_PUBLISHED = "tests/algorithms/dflash/test_published.py::"
_HEADS = "tests/algorithms/eagle/test_published.py::"
_dflash = bugs_in("algorithms/dflash/drafting.py")
_scheduler = bugs_in("algorithms/engine/scheduler.py")
_session = bugs_in("algorithms/engine/session.py")
_model = bugs_in("algorithms/eagle/model.py")
_prefill_batch = bugs_in("algorithms/step/prefill_batch.py")
_grammar = bugs_in("algorithms/engine/grammar.py")

MUTANTS = (
    _scheduler("the_last_stop_string_cuts", "return {{min -> max}}(found, default=None)",
               (_SCHEDULER + "test_endings",), "an output holds the beginning of a stop string"),
    _session("one_page_of_a_failed_request_is_cleared", "cache.zero(running.pages{{ -> [:1]}})",
             (_FAULTS + "test_every_page_of_a_failed_request_is_cleared",), "NaN in a page that the next request gets"),
    _session("an_aborted_request_keeps_its_matcher", "{{        self._matchers.pop(request_id, None)\n -> }}",
             ("tests/algorithms/test_constraints.py::test_an_aborted_request_leaves_no_matcher",),
             "a server runs out of memory by aborts"),
    bugs_in("algorithms/parallel/layers.py")(
        "every_rank_adds_the_bias_to_its_part",
        "            y = F.linear(x, self.weight{{ -> , self.bias}})\n",
        ("tests/algorithms/parallel/test_tensor_parallel.py::test_ranks_exchange_sums_columns_and_decisions",),
        "a bias counts as often as there are ranks",
    ),
    bugs_in("specdec_kernels/launch.py")(
        "launch_on_the_current_gpu",
        "    with {{_on_device_of(tensor) -> nullcontext()}}:\n",
        ("tests/kernels/test_launch.py::test_a_launch_goes_to_the_gpu_of_its_tensors",),
        "historical: tensors of the second GPU, a launch on the first",
    ),
    bugs_in("algorithms/attention/paged_attention.py")(
        "levels_read_slots_of_later_levels",
        "tree_width=first + {{(level + 1) -> min(level + 2, count)}} * width)",
        (_FAULTS + "test_nothing_is_read_before_it_is_written[fa4-standalone_tree]",),
        "historical: a level reads the slots that the next one writes, and NaN in them reaches every output",
    ),
    _scheduler("prompts_without_a_row_ride_alone", "        return wanted {{>= tiles -> > 0}}\n",
               (_SCHEDULER + "test_prompts_without_a_row_are_prefilled_together",),
               "each prompt that nobody waits for lengthens a step of its own"),
    _scheduler("stop_strings_of_three_tokens", "text = self._decode([*written, *emitted[:index]]{{ -> [-3:]}})",
               (_SCHEDULER + "test_stop_strings_may_span_any_number_of_tokens_and_steps",),
               "a stop string of more than three tokens is not seen"),
    bugs_in("algorithms/drafting/sampled_tree.py")("keys_of_sampled_drafts_repeat",
                                                   "sampling.temperature, sampling.seeds, batch.lengths{{ ->  // 2}},",
                                                   (_FAULTS + "test_sampled_drafts_never_use_a_key_twice",),
                                                   "a draft of this step and one of the next are drawn by one uniform"),
    bugs_in("specdec_kernels/tree/reference.py")("own_bit_of_a_wide_tree_in_the_first_word",
                                                 "word == {{(own // WORD_BITS) -> 0 * own}}[:, None]",
                                                 (_HEADS + "test_tokens_of_wide_trees_see_their_paths_alone",),
                                                 "a node at draft slot 64 or above does not see itself"),
    bugs_in("algorithms/step/batch.py")(
        "one_token_prompts_inherit_a_feature",
        "torch.where((prompts.counts > 0)[:, None], last, {{0.0 -> self._rows[prompts.slots]}})",
        (_FAULTS + "test_a_row_forgets_the_request_before[eagle_chain]",),
        "a prompt of one token is drafted from the feature that another request left in its row",
    ),
    _dflash("the_window_of_the_run_replaces_nothing", "for window in (own,{{ run_window -> }}) if",
            (_PUBLISHED + "test_a_window_of_the_run",), "algo.window is ignored"),
    _dflash("the_wider_window_wins", "{{min -> max}}(windows, default=None)",
            (_PUBLISHED + "test_a_window_of_the_run",),
            "of the window of the run and that of the layer the wider one is taken"),
    bugs_in("algorithms/dflash/model.py")(
        "the_last_layer_before_the_norm",
        "[{{hidden if index == last else  -> }}feature for",
        (_PUBLISHED + "test_greedy_chains[zlab]",),
        "a drafter that reads the target's last layer gets the stream in front of the final norm",
    ),
    bugs_in("algorithms/step/step.py")(
        "padding_rows_move_keys",
        "memory.commit(self.mixer, batch, committed{{ -> ._replace(nodes=accepted.nodes)}}, self._chain)",
        (_FAULTS + "test_a_padding_row_moves_nothing",),
        "a padding row of a captured step moves keys and values in pages that it no longer owns",
    ),
    bugs_in("specdec_kernels/sampling/reference.py")(
        "min_p_before_temperature",
        "top + {{divisor[:, 0] *  -> }}share.log()",
        ("tests/kernels/test_sampling_filters.py::test_any_filter[reference]",),
        "min-p is measured on the distribution at temperature 1",
    ),
    bugs_in("specdec_kernels/sampling/kernel_filter.py")(
        "min_p_before_temperature_in_the_kernel",
        "tl.log2(min_p) / {{scale -> 1.4426950408889634}}",
        ("tests/kernels/test_sampling_filters.py::test_any_filter[triton]",),
        "min-p is measured on the distribution at temperature 1",
    ),
    bugs_in("specdec_kernels/attention/types.py")(
        "heads_of_any_size",
        "if self.head_dim {{% 16 or not 16 <= self.head_dim <= -> >}} MAX_HEAD_DIM:",
        ("tests/experiments/test_plan.py::test_head_dimensions_are_checked_before_weights_load",),
        "historical: a head dimension of 24 ends in a traceback at the first prefill",
    ),
    _model("norm_output_is_ignored", "self.norm(hidden){{ if is_raw else hidden -> }}",
           (_HEADS + "test_the_distribution_of_a_sampled_chain[specforge old false]",),
           "historical: a head without the norm before its LM head drafts other tokens"),
    _model(
        "fc_norm_is_ignored",
        "features = {{[norm(feature) for norm, feature in zip(self.fc_norm, features, strict=True)] -> "
        "list(features)}}",
        (_HEADS + "test_the_distribution_of_a_sampled_chain[speculators each]",),
        "historical: vLLM created the norms of EAGLE-3.1 for one kind of head, and never applied them (its PR 43482)",
    ),
    _prefill_batch("a_chunk_keeps_the_text_of_the_one_before", "            arrays[name]{{ -> [:1]}}.fill(0)\n",
                   ("tests/algorithms/step/test_prefill_batch.py::test_padding_holds_nothing_of_an_earlier_chunk",),
                   "tiles of padding that hold what an earlier chunk sent"),
    _prefill_batch("last_token_of_a_prompt_in_its_first_tile",
                   "first_tile * self.tile + {{max(0, count - 1) -> min(self.tile, max(1, count)) - 1}}",
                   ("tests/algorithms/test_prefill.py::test_drafts_do_not_depend_on_the_cut[eagle3_chain]",),
                   "what a drafter keeps of a prompt is taken from its first tile"),
    _grammar("nothing_may_follow_a_drafted_stop_token", "            bits[node] = {{-1 -> 0}}\n",
             ("tests/algorithms/test_constraints.py::test_every_algorithm_writes_what_the_loop_writes[dflash_chain]",),
             "a request fails in the step that accepts its drafted stop token, because no token may follow"),
    _session("text_in_flight_is_followed_twice", "ahead{{[max(0, seen - len(known)) :] -> }}",
             ("tests/algorithms/test_constraints.py::test_captured_steps[eagle3_tree-step-2]",),
             "with two steps in flight a grammar follows the tokens of one of them twice"),
    _grammar("forced_text_stays_in_the_matcher", "        self._matcher.rollback({{count -> min(count, 1)}})\n",
             ("tests/algorithms/test_constraints.py::test_every_algorithm_writes_what_the_loop_writes[dflash_chain]",),
             "a grammar takes jump-forward tokens for tokens of the output"),
    bugs_in("algorithms/drafting/tree_drafter.py")(
        "tree_keeps_the_last_nodes",
        "    column = torch.where(kept, {{ -> count - 1 - }}number, count).clamp({{ -> min=0, }}max=count)\n",
        ("tests/algorithms/drafting/test_insert_chain.py::test_the_last_nodes_of_a_tree_give_way[reference]",),
        "nodes move and the numbers of their parents do not, so the draft is no tree any more",
    ),
    _session(
        "accepted_drafts_lost_before_a_dead_end",
        "            slot = slot.{{without_bonus() -> _replace(tokens=[], logprobs=[], top=[])}}\n",
        ("tests/algorithms/test_constraints.py::test_a_grammar_that_leaves_no_token_ends_its_request_alone[ngram]",),
        "a request fails for the token behind the drafts that end it, which the target alone never reaches",
    ),
)  # fmt: skip
