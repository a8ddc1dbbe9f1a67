"""Bugs of attention backends in captured steps."""

from __future__ import annotations

from tests.mutants.mutant import bugs_in

_FILE = "tests/algorithms/attention/test_captured_backends.py"
_LENGTHS, _PROMPTS = (
    (f"{_FILE}::test_flashinfer_follows_the_lengths_between_replays[{mixed}]",) for mixed in (True, False)
)
_flashinfer = bugs_in("algorithms/attention/backends/flashinfer.py")

MUTANTS = (
    _flashinfer(
        "chain_aligned_at_its_used_rows",
        "keys = keys + (num_nodes if chain {{else -> and False else}} metadata.used_slots(num_nodes))",
        ("tests/algorithms/attention/test_packages.py::test_results[None-chain_q_lens-FlashInferBackend]",),
        "the rows of a request that uses few of them see keys of other positions",
    ),
    _flashinfer(
        "buffers_of_another_plan",
        "if self._filled is {{not plan -> None}}:",
        ("tests/algorithms/attention/test_packages.py::test_flashinfer_plans_interleave",),
        "a forward attends over the pages of the forward before",
    ),
    bugs_in("algorithms/step/runner.py")(
        "bound_without_the_drafts",
        "longest = max_length{{ + max(algorithm.num_nodes, algorithm.draft_slots) -> }}",
        _LENGTHS,
        "keys of a step are not planned for",
    ),
    bugs_in("algorithms/step/prefill.py")(
        "prompts_replayed_with_the_plan_of_a_step",
        "{{            self._parts.resources.backend.plan_replay(prefill.longest)\n -> }}",
        _PROMPTS,
        "keys of a prompt are not planned for",
    ),
)
