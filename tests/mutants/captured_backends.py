"""Bugs of attention backends in captured steps."""

from __future__ import annotations

from tests.mutants.mutant import bugs_in

_FILE = "tests/algorithms/attention/test_packages.py"
_flashinfer = bugs_in("algorithms/attention/backends/flashinfer.py")

MUTANTS = (
    _flashinfer(
        "chain_aligned_at_its_used_rows",
        "keys, columns = metadata.lengths + {{shape.num_nodes -> metadata.used_rows(shape.num_nodes)}}, columns",
        (f"{_FILE}::test_results[None-chain_q_lens-FlashInferBackend]",),
        "the rows of a request that uses few of them see keys of other positions",
    ),
    _flashinfer("buffers_of_another_plan",
                "{{        plan.planned.fill(plan)\n -> }}        out, flat = torch.empty_like(q), q.flatten(0, 1)",
                (f"{_FILE}::test_flashinfer_plans_interleave",),
                "a forward attends over the pages of the forward before"),
    _flashinfer("chunks_as_planned", "if self._most > {{1 -> _ANY_PAGES}}:",
                (f"{_FILE}::test_flashinfer_replays_other_lengths[chain]",),
                "historical: partial results are merged by the number of chunks of the lengths that were planned"),
)  # fmt: skip
