"""Tiles of the kernels per chip. Every call of the recurrence has the same tile, whatever its number of rows."""

from dataclasses import dataclass

from specdec_kernels.launch import CHIPS


@dataclass(frozen=True)
class DeltaConfig:
    input_rows: int = 2  # rows of a program of the inputs, for one head
    values: int = 32  # columns of the state of a program of the recurrence
    tail_block: int = 1024  # channels of a program that keeps inputs of the convolution
    norm_rows: int = 8  # heads of a program of the gated norm
    part: int = 64  # keys of a row that one product takes where states pass through chunks
    chunk_part: int = 32  # where one chunk is solved
    tree_part: int = 1024  # elements of a tile of keys where a tree is solved, at least 16 keys of a row
    chunk_warps: int = 4  # of a program of one chunk or tree
    chunk_values: int = 16  # columns of the state of a program that takes it through chunks
    tree_values: int = 8192  # outputs of a program of a tree, fewer for few programs
    precision: str = "tf32x3"  # of the products of chunks and trees; those of float32 models are float32


# The interpreter's time goes with programs, not lanes.
CONFIGS = dict.fromkeys(CHIPS, DeltaConfig()) | {
    "sm80": DeltaConfig(part=16, chunk_part=16, chunk_warps=8, tree_values=2048, tree_part=512),
    "sm100": DeltaConfig(tree_values=1024, tree_part=512),
    "gfx942": DeltaConfig(tree_part=512, precision="ieee"),
    "interpreter": DeltaConfig(
        input_rows=256, values=256, chunk_values=256, tree_values=1 << 16, tail_block=1 << 14, norm_rows=1024
    ),
}
