"""Bugs around the kernels: where they run, and what is handed to them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_FAULTS = "tests/algorithms/test_faults.py::"

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
)
