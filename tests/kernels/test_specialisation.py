"""What varies from step to step compiles no further variant of a kernel, and compilations are seen."""

from pathlib import Path

import pytest

from specdec_kernels.launch import record_compilations
from tests.kernels.test_compile_gate import run_program

FIXED = {
    "K": "width of the weights",
    "OUTER": "outputs of the weights",
    "groups": "scales of a row of the weights",
    "scale_stride": "width of packed weights",
    "weight_stride": "width of packed weights",
    "split_length": "a part of the width of the weights",
    "plane_stride": "size of the pool",
    "row_stride": "vocabulary, or that times the nodes of a tree",
    "width": "width of the MLP",
}
"""Integers that may be specialised, because they are the same in every step of a run."""


@pytest.mark.timeout(600)
def test_integers_that_vary_are_not_specialised(tmp_path: Path) -> None:
    """Every integer that a kernel gets at run time is in its `do_not_specialize`, or fixed for a run."""
    run_program(
        tmp_path,
        f"""
        from specdec_kernels import FAMILIES
        from specdec_kernels.launch import leaves
        from specdec_kernels.projection import ScaledWeight, cases
        from tools.compile_gate.jobs import collect

        def zeros(make, outer, inner, group_rows, group_inner):
            scales = torch.zeros(-(-outer // group_rows), -(-inner // group_inner))
            return ScaledWeight(torch.zeros(outer, inner, dtype=torch.uint8), scales, group_rows, group_inner)

        # Recorded launches read nothing, and random numbers for a real vocabulary take seconds.
        cases.scaled_weight = zeros
        torch.multinomial = lambda values, *_, **__: torch.zeros(len(values), 1, dtype=torch.int64)

        specialised = {{
            (parameter.name, family, one.kernel.__name__)
            for family in FAMILIES
            for one in collect(family, "sm90", {{}})
            for parameter, given in zip(one.kernel.params, one.args)
            for _, value in leaves((given,))
            if type(value) is int and not parameter.is_constexpr and not parameter.do_not_specialize
        }}
        fixed = set({sorted(FIXED)!r})
        unlisted = [place for place in sorted(specialised) if place[0] not in fixed]
        assert not unlisted, f"add these to do_not_specialize: {{unlisted}}"
        unneeded = fixed - {{name for name, *_ in specialised}}
        assert not unneeded, f"listed, but not specialised: {{unneeded}}"
        """,
    )


@pytest.mark.timeout(600)
def test_compilations_are_recorded(tmp_path: Path) -> None:
    """By the compiler itself, for a chip that is not there: once per variant, and no longer than the block lasts."""
    run_program(
        tmp_path,
        """
        from triton import knobs
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver
        from specdec_kernels.launch import record_compilations

        class Absent:
            def get_current_target(self): return GPUTarget("cuda", 90, 32)
            def get_current_device(self): return 0
            def get_current_stream(self, device): return 0

        driver.set_active(Absent())

        def warm(block):
            copying.warmup(x, x, BLOCK=block, grid=(1,))

        warm(64)
        earlier = []
        knobs.runtime.jit_post_compile_hook = lambda *args, **told: earlier.append(told["fn"].name)
        with record_compilations() as names:
            warm(64), warm(128), warm(128), warm(256)
        warm(512)
        assert [name.rpartition(".")[2] for name in names] == ["copying"] * 2, names
        assert len(earlier) == 3, "a hook that was there before is called, and stays"
        """,
    )


def test_the_interpreter_compiles_nothing() -> None:
    with record_compilations() as names:
        pass
    assert names == []
