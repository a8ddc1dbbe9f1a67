"""Commit: one program per request for its state, and copies of rows for what a drafter observes and keeps.

The state of a request is one short row, so one program holds it whole, and writes the state of its own request alone.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.commit.types import CommitInputs, Committed
from specdec_kernels.launch import CHIPS, current_chip, lanes, launch

# What a program copies. In the interpreter, only the number of programs costs.
BLOCK_ROWS = dict.fromkeys(CHIPS, 4) | {"interpreter": 512}
BLOCK_WIDTH = dict.fromkeys(CHIPS, 1024) | {"interpreter": 4096}


@triton.jit
def _write_table(
    table_ptr, logprobs_ptr, request, column, in_row, token, accepted, valid, drafted, ran_out, PATH: tl.constexpr
):
    """One row of the table that the host reads, see `Committed`."""
    row = table_ptr + request * (2 * PATH + 4)
    tl.store(row + column, token, mask=in_row)
    if logprobs_ptr is not None:
        logprob = tl.load(logprobs_ptr + request * PATH + column, mask=in_row, other=0.0)
        tl.store(row + PATH + column, logprob.to(tl.int32, bitcast=True).to(tl.int64), mask=in_row)
    else:
        tl.store(row + PATH + column, column * 0, mask=in_row)
    tl.store(row + 2 * PATH, accepted.to(tl.int64))
    tl.store(row + 2 * PATH + 1, valid.to(tl.int64))
    tl.store(row + 2 * PATH + 2, drafted.to(tl.int64))
    tl.store(row + 2 * PATH + 3, ran_out.to(tl.int64))


@triton.jit
def _draft_figures(inputs, request, end, NODES: tl.constexpr, BLOCK_N: tl.constexpr):
    """Number of nodes linked after the root, and whether node `end` has no child. A linked node is the first child or
    the next sibling of one node."""
    node = tl.arange(0, BLOCK_N).to(tl.int64)
    child = tl.load(inputs.first_child + request * NODES + node, mask=node < NODES, other=-1)
    sibling = tl.load(inputs.next_sibling + request * NODES + node, mask=node < NODES, other=-1)
    drafted = tl.sum((child >= 0).to(tl.int32) + (sibling >= 0).to(tl.int32), 0)
    return drafted, tl.sum(((node == end) & (child < 0)).to(tl.int32), 0)


@triton.jit(do_not_specialize=["capacity"])
def _commit_kernel(
    inputs,  # CommitInputs
    out,  # Committed, written
    capacity,
    NODES: tl.constexpr,
    PATH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK).to(tl.int64)
    in_row = column < PATH
    own = request * PATH + column
    accepted = tl.load(inputs.num_accepted + request)
    active = tl.load(inputs.active + request)
    length = tl.load(inputs.lengths + request)
    count = (accepted + 1) * active
    token = tl.load(inputs.tokens + own, mask=in_row, other=-1)
    node = tl.load(inputs.nodes + own, mask=in_row, other=-1)
    end = tl.maximum(tl.sum(tl.where(column == accepted, node, 0), 0), 0)
    num_drafted, ran_out = _draft_figures(inputs, request, end, NODES, BLOCK_N)
    on_path = in_row & (column < count)
    node = tl.where(on_path, node, -1)
    drafted = tl.load(inputs.draft_tokens + request * NODES + tl.maximum(node, 0), mask=in_row, other=0)

    tl.store(out.start + request, length)
    tl.store(out.counts + request, count)
    tl.store(out.positions + own, length + column, mask=in_row)
    tl.store(out.nodes + own, node, mask=in_row)
    tl.store(out.tokens + own, drafted, mask=in_row)
    tl.store(out.next_tokens + own, tl.maximum(token, 0), mask=in_row)
    valid = tl.load(inputs.valid + request)
    _write_table(
        out.table, inputs.logprobs, request, column, in_row, token, accepted, valid, num_drafted, ran_out, PATH
    )  # fmt: skip

    place = length + 1 + column
    tl.store(inputs.history + request * capacity + place, token, mask=on_path & (place < capacity))
    tl.store(inputs.lengths + request, length + count)
    bonus = tl.sum(tl.where(column == accepted, token, 0), 0)
    tl.store(inputs.last_tokens + request, bonus, mask=active > 0)


@triton.jit(do_not_specialize=["rows"])
def _gather_kernel(
    values_ptr,  # [B, NODES, WIDTH]
    nodes_ptr,  # [B, PATH] int32
    out_ptr,  # [B, PATH, WIDTH]
    rows,  # B * PATH
    NODES: tl.constexpr,
    PATH: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    feature = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    node = tl.load(nodes_ptr + row, mask=row < rows, other=0)
    source = row // PATH * NODES + tl.where((node >= 0) & (node < NODES), node, 0)
    live = (row < rows)[:, None] & (feature < WIDTH)[None, :]
    value = tl.load(values_ptr + source[:, None] * WIDTH + feature[None, :], mask=live, other=0.0)
    tl.store(out_ptr + row[:, None] * WIDTH + feature[None, :], value, mask=live)


@triton.jit(do_not_specialize=["path"])
def _keep_last_kernel(
    store_ptr,  # [B, WIDTH]
    values_ptr,  # [B, path, WIDTH]
    counts_ptr,  # [B] int32
    path,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    count = tl.load(counts_ptr + request)
    live = (feature < WIDTH) & (count > 0)
    value = tl.load(values_ptr + (request * path + count - 1) * WIDTH + feature, mask=live, other=0.0)
    tl.store(store_ptr + request * WIDTH + feature, value, mask=live)


def commit_step(inputs: CommitInputs) -> Committed:
    tokens, lengths = inputs.tokens, inputs.lengths
    batch, path = tokens.shape
    num_nodes = inputs.draft_tokens.shape[1]
    committed = Committed(
        start=torch.empty_like(lengths),
        counts=torch.empty_like(inputs.num_accepted),
        positions=torch.empty_like(tokens),
        nodes=torch.empty_like(inputs.nodes),
        tokens=torch.empty_like(tokens),
        next_tokens=torch.empty_like(tokens),
        table=tokens.new_empty((batch, 2 * path + 4)),
    )
    launch(
        _commit_kernel,
        (batch,),
        *(inputs, committed, inputs.history.shape[1]),
        num_warps=1 if path <= 64 else 4,
        NODES=num_nodes,
        PATH=path,
        BLOCK=lanes(path),
        BLOCK_N=lanes(num_nodes),
    )
    return committed


def gather_path(values: Sequence[Tensor], nodes: Tensor) -> list[Tensor]:
    batch, path = nodes.shape
    num_nodes, width = values[0].shape[1:]
    chip = current_chip(nodes)
    rows = min(lanes(batch * path), BLOCK_ROWS[chip])
    block = min(lanes(width), BLOCK_WIDTH[chip])
    gathered = [value.new_empty((batch, path, width)) for value in values]
    for value, out in zip(values, gathered, strict=True):
        launch(
            _gather_kernel,
            (-(-batch * path // rows), -(-width // block)),
            *(value, nodes, out, batch * path),
            NODES=num_nodes,
            PATH=path,
            WIDTH=width,
            ROWS=rows,
            BLOCK_W=block,
        )
    return gathered


def keep_last(store: Tensor, values: Tensor, counts: Tensor) -> None:
    batch, width = store.shape
    block = min(lanes(width), BLOCK_WIDTH[current_chip(store)])
    launch(
        _keep_last_kernel,
        (batch, -(-width // block)),
        *(store, values, counts, values.shape[1]),
        WIDTH=width,
        BLOCK_W=block,
    )
