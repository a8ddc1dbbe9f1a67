"""Sizes of the selection and penalty kernels per chip."""

from dataclasses import dataclass, replace

from specdec_kernels.launch import CHIPS


@dataclass(frozen=True)
class SelectionConfig:
    """Widths depend on the vocabulary alone, so that a row's result does not depend on its batch."""

    slots: int = 128  # groups of 64 tokens that a program holds in registers
    steps: int = 4  # steps of 256 tokens that make a strip
    strips: int = 4  # strips of a program of the first kernel, one a warp, where no row is sampled
    sampled_strips: int = 2  # where some are
    max_rows: int = 1  # rows of one program of the second kernel
    pick_warps: int = 1  # of a row whose token is known from its strips
    sample_warps: int = 4  # of a row that is sampled
    select_warps: int = 8  # of a row whose threshold is searched
    chunk: int = 2048  # tokens of one program of the kernels over deferred rows
    chunk_warps: int = 4
    programs: int = 1056  # programs that share the chunks of all deferred rows
    keep: int = 64  # values of a class that there is room for in a chunk, at most 254


_GPU = SelectionConfig()
SELECTION = dict.fromkeys(CHIPS, _GPU) | {
    "sm100": replace(_GPU, sample_warps=8),  # four would spill
    # The interpreter's time goes with programs, not lanes; few slots, so that its cases reach the deferred rows, and
    # several warps, though none runs there, so that their parts are added as on a GPU.
    "interpreter": SelectionConfig(
        slots=8, strips=1 << 10, sampled_strips=1 << 10, max_rows=1 << 15, sample_warps=1, select_warps=2, chunk=1024
    ),
}
PENALTY_TILE = dict.fromkeys(CHIPS, 2048) | {"interpreter": 8192}
FORBID_TILE = 64  # forbidden sequences that a program compares at a time, on every chip
