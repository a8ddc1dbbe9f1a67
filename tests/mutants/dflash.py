"""Bugs in block drafters: conventions of the families, and their heads."""

from __future__ import annotations

from tests.mutants.mutant import bugs_in

_TESTS = "tests/algorithms/dflash/test_published.py::"
_config, _drafting, _heads = (bugs_in(f"algorithms/dflash/{name}.py") for name in ("config", "drafting", "heads"))
_formats, _model = (bugs_in(f"algorithms/dflash/{name}.py") for name in ("loading", "model"))

MUTANTS = (
    _formats("block_deepspec_slots_draft_themselves", "DEEPSPEC: {{NEXT -> OWN}},",
             (_TESTS + "test_greedy_chains[deepspec dflash]",),
             "historical: every draft is one position off (sglang-jax#1619)"),
    _formats("block_speculators_slots_draft_the_next", "SPECULATORS: {{OWN -> NEXT}}}",
             (_TESTS + "test_greedy_chains[speculators dflash]",),
             "historical: an absent sample_from_anchor is read as true (vllm#48639)"),
    bugs_in("algorithms/models/loading/speculators.py")("block_layers_run_are_layer_ids", "int(count){{ - 1 -> }} for",
                                                        (_TESTS + "test_greedy_chains[speculators dflash]",),
                                                        "historical: features of one layer late (vllm#40727)"),
    _drafting("block_windows_from_the_anchor_are_one_short", '"tree", own{{ + 1 -> }}',
              (_TESTS + "test_the_distribution_of_a_sampled_chain[speculators dflash]",),
              "a window of W sees W - 1 positions before the last committed token"),
    _drafting("block_windows_from_the_anchor_move_with_the_slot", "depths=links.depth{{ * 0 -> }}",
              (_TESTS + "test_the_distribution_of_a_sampled_chain[speculators dflash]",),
              "historical: windows of speculators count from each query (sfllm#35 the other way round)"),
    bugs_in("algorithms/drafting/tree_drafter.py")("block_drafts_keep_their_own_ids",
                                                   "ids if vocabulary is None else ids{{ + vocabulary.take(ids) -> }}",
                                                   (_TESTS + "test_greedy_chains[speculators dspark vanilla]",),
                                                   "ids of a reduced vocabulary are taken for the target's"),
    _heads("block_token_before_the_hidden_state_in_a_gate", "torch.cat([{{hidden, e -> e, hidden}}], -1))) * e",
           (_TESTS + "test_the_distribution_of_a_sampled_chain[deepspec gated]",),
           "the halves of the input of a gate are swapped"),
    _heads("block_states_are_not_carried_to_children", "self._state.gather(1, {{parents -> 0 * parents}}[..., None]",
           (_TESTS + "test_trees[speculators dspark rnn]",),
           "all nodes of a level continue the state of its first parent"),
    _heads("block_own_slots_begin_without_a_state", "before.shape[1] if {{self.state_size -> False}} else 0",
           (_TESTS + "test_the_distribution_of_a_sampled_chain[speculators dspark rnn]",),
           "a recurrent head does not run over slot 0, as in training"),
    _heads("block_taps_are_not_shifted", "F.pad(x, (0, 0, {{tap -> 0}}, 0))[..., : x.shape[-2], :]",
           (_TESTS + "test_the_distribution_of_a_sampled_chain[dflash 2]",),
           "both taps of a convolution read the row itself"),
    _heads("block_domino_corrects_its_plain_drafts", "slot.level < self.num_plain{{ -> - 1}}",
           (_TESTS + "test_the_distribution_of_a_sampled_chain[domino]",),
           "the first drafts are corrected although they were trained without"),
    _model("block_candidates_before_the_scale", "values = {{self.cap -> }}(logits.gather(-1, tokens).float())",
           (_TESTS + "test_the_distribution_of_a_sampled_chain[dflash 2]",), "pair scores are added to raw logits"),
)  # fmt: skip
