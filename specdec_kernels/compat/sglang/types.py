"""Arguments as records, and the launch form of SGLang."""

from collections.abc import Callable
from enum import IntEnum
from functools import partial, update_wrapper
from inspect import signature
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from specdec_kernels.checks import expect_at_least, expect_dtype, expect_same_device, expect_tensors

INT32_MAX = 2**31 - 1
INTEGERS = (torch.int32, torch.int64)
Grid = tuple[int, ...]


class TreeMaskMode(IntEnum):
    """Layouts of `tree_mask`."""

    FULL_MASK = 0
    QLEN_ONLY = 1
    QLEN_ONLY_BITPACKING = 2


class Outcome(NamedTuple):
    """Tensors that a verification writes."""

    predicts: Annotated[Tensor, "* int32|int64"]
    accept_index: Annotated[Tensor, "B S int32|int64"]
    accept_token_num: Annotated[Tensor, "B int32|int64"]


class Tree(NamedTuple):
    """Tokens and links of the trees that are verified, [bs, n] each."""

    candidates: Annotated[Tensor, "B N int32|int64"]
    retrive_index: Annotated[Tensor, "B N int32|int64"]
    next_token: Annotated[Tensor, "B N int32|int64"]
    next_sibling: Annotated[Tensor, "B N int32|int64"]


class Sampling(NamedTuple):
    """Random numbers and distributions of `tree_speculative_sampling_target_only`."""

    uniforms: Annotated[Tensor, "B N float32"]
    final_uniforms: Annotated[Tensor, "B float32"]
    target_probs: Annotated[Tensor, "B N V float32"]
    draft_probs: Annotated[Tensor, "B N V float32"]  # changed


class BuiltTree(NamedTuple):
    """Tensors that tree building writes, see `build_tree_kernel_efficient`."""

    positions: Tensor
    retrive_index: Tensor
    next_token: Tensor
    next_sibling: Tensor


class Selected(NamedTuple):
    """Arguments of `build_tree_kernel_efficient`."""

    selected: Tensor  # [bs, n - 1]
    parent_list: Tensor  # [bs, rows]
    lengths: Tensor  # [bs] int64
    tree_mask: Tensor  # written
    outputs: BuiltTree
    topk: int
    depth: int
    mode: TreeMaskMode


class Spans(NamedTuple):
    """A span of `counts[b]` entries per request, from position `start[b]` of row `rows[b]` of the table on; without a
    table an entry is its position. `values` has the spans from `offsets[b]` on, or one after another."""

    table: Tensor | None  # [num_rows, width]
    rows: Tensor | None  # [bs]
    start: Tensor  # [bs]
    counts: Tensor  # [bs]
    values: Tensor  # [capacity]; spans that do not fit are truncated
    offsets: Tensor | None = None  # [bs + 1]


class Sequences(NamedTuple):
    """Lists of table entries, `repeat` of each request in each step: number t in step s has 1 + s + `growth` * t drafts
    after the prefix, of which the first `sink` and the last `limit - sink` positions are kept (all where it is not
    longer). With `num_steps` sequence t is a draft branch, which begins on a page of its own; with 0 drafts follow the
    prefix."""

    table: Tensor | None
    rows: Tensor | None
    lengths: Tensor  # [bs]
    indptr: Tensor  # [steps, >= bs * repeat + 1], written by `list_sequences`
    values: Tensor  # [steps, capacity], written; sequences that do not fit are truncated
    repeat: int
    growth: int = 0
    num_steps: int = 0
    page_size: int = 1
    limit: int = INT32_MAX
    sink: int = 0


def by_request(name: str, tensor: Tensor, batch: int, width: int, *dtypes: torch.dtype) -> Tensor:
    """The first `batch * width` entries as [batch, width]."""
    expect_dtype(name, tensor, *(dtypes or INTEGERS))
    expect_at_least(f"{name}'s entries", tensor.numel(), batch * width)
    return tensor.reshape(-1)[: batch * width].view(batch, width)


class Launcher:
    """A function that may also be called as SGLang calls its kernels, `name[grid](...)`; made by `launched`."""

    def __init__(self, function: Callable[..., None], per_request: tuple[str, ...], axis: int) -> None:
        self._function, self._per_request, self._axis = function, per_request, axis
        self._signature = signature(function)
        update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._run((), *args, **kwargs)

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        if not isinstance(grid, tuple) or not all(isinstance(size, int) for size in grid):
            raise ValueError(f"grid: expected a tuple of integers, got {grid!r}")
        return partial(self._run, grid)

    def _run(self, grid: Grid, *args: Any, **kwargs: Any) -> None:
        if "impl" not in self._signature.parameters:  # plain torch
            kwargs.pop("impl", None)
        given = self._signature.bind(*args, **kwargs)
        named = {name: given.arguments.get(name) for name in self._per_request}
        tensors = {name: tensor for name, tensor in named.items() if tensor is not None}
        if grid:
            tensors = {name: tensor[: grid[self._axis]] for name, tensor in tensors.items()}
            if "grid" in self._signature.parameters:
                given.arguments["grid"] = grid
        for name, tensor in tensors.items():
            expect_tensors(**{name: (tensor, tensors[self._per_request[0]].shape[:1], INTEGERS)})
        expect_same_device(**tensors)
        given.arguments.update(tensors)
        self._function(*given.args, **given.kwargs)


def launched(*per_request: str, axis: int = 0) -> Callable[[Callable[..., None]], Launcher]:
    """Makes a function a `Launcher`. A grid's entry `axis` is the number of requests, and of the arguments
    `per_request`, integers [>= bs], it takes the first ones. The function gets the grid if it has such an argument."""
    return lambda function: Launcher(function, per_request, axis)
