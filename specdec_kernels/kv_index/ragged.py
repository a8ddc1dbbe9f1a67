"""Ragged rows: prefix sums, positions after acceptance, token and page tables written and read, compaction.

Batches of requests with different counts lie one behind the other, row b at [o_b, o_b + c_b) with o_b the sum
of the counts before it. The sums are made once, by one program; every kernel behind them finds the row of its
place by bisection. A token table (SGLang's req_to_token) holds the pool slot of every position of a request;
a page table is the same thing with pages for positions, so both are written and read by the same functions.
"""

from __future__ import annotations

import torch

from specdec_kernels.checks import expect_contiguous, expect_dtype, expect_same_device, expect_shape
from specdec_kernels.kv_index import ragged_reference as reference
from specdec_kernels.kv_index.arguments import check_at_least, check_out, check_requests, check_token_table
from specdec_kernels.kv_index.types import Compacted, RaggedValues
from specdec_kernels.launch import use_triton


def row_offsets(counts: torch.Tensor, capacity: int | None = None, impl: str = "auto") -> torch.Tensor:
    """Exclusive prefix sums of `counts` with the total behind them.

    Args:
        counts: [B] int32 or int64; negative entries count as 0.
        capacity: no sum is larger than this; by default 2^31 - 1.
        impl: `auto`, `triton` or `reference`.

    Returns:
        [B + 1] int32.

    Raises:
        ValueError: wrong shape, dtype or strides, `capacity` below 0.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    check_requests(counts=counts)
    check_at_least("capacity", 0 if capacity is None else capacity, 0)
    if use_triton(impl, counts):
        import specdec_kernels.kv_index.ragged_kernel as kernel

        return kernel.row_offsets(counts, capacity)
    return reference.row_offsets(counts, capacity)


def accepted_positions(
    start: torch.Tensor,
    counts: torch.Tensor,
    capacity: int,
    *,
    out: torch.Tensor | None = None,
    impl: str = "auto",
) -> RaggedValues:
    """Positions start, start + 1, ... of the tokens that a step committed, all requests one behind the other.

    Args:
        start: [B] int32 or int64, committed length before the step.
        counts: [B] int32 or int64, tokens that the step committed, bonus included.
        capacity: entries of the result; rows that do not fit are cut.
        out: [capacity] int32 or int64 to write instead of a new tensor; entries that no row owns keep their
            contents.
        impl: `auto`, `triton` or `reference`.

    Returns:
        RaggedValues: offsets [B + 1] int32, values [capacity] int64, -1 behind the last row.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, `capacity` below 0.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    check_requests(start=start, counts=counts)
    check_at_least("capacity", capacity, 0)
    check_out("out", out, start, (capacity,))
    if use_triton(impl, start):
        import specdec_kernels.kv_index.ragged_kernel as kernel

        return kernel.accepted_positions(start, counts, capacity, out=out)
    return reference.accepted_positions(start, counts, capacity, out=out)


def read_table(
    table: torch.Tensor,
    rows: torch.Tensor,
    start: torch.Tensor,
    counts: torch.Tensor,
    capacity: int,
    *,
    fill: int = -1,
    dtype: torch.dtype = torch.int64,
    offsets: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    impl: str = "auto",
) -> RaggedValues:
    """Entries start, start + 1, ... of every request's table row, all requests one behind the other.

    Args:
        table: [R, W] int32 or int64, slots of positions (or page ids).
        rows: [B] int32 or int64, the row of each request.
        start: [B] int32 or int64, first column.
        counts: [B] int32 or int64, columns wanted.
        capacity: entries of the result; rows that do not fit are cut.
        fill: what stands behind the last row and for a column or row outside the table.
        dtype: int32 or int64, of the values.
        offsets: [B + 1] int32 to use instead of the sums of `counts`.
        out: [capacity] to write instead of a new tensor; entries that no row owns keep their contents.
        impl: `auto`, `triton` or `reference`.

    Returns:
        RaggedValues: offsets [B + 1] int32, values [capacity] `dtype`.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, `capacity` below 0.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    check_token_table(table, rows, torch.int64, start=start, counts=counts)
    check_at_least("capacity", capacity, 0)
    check_out("out", out, table, (capacity,))
    if dtype not in (torch.int32, torch.int64):
        raise ValueError(f"dtype: expected torch.int32 or torch.int64, got {dtype}")
    if offsets is not None:
        expect_shape("offsets", offsets, (rows.shape[0] + 1,))
        expect_dtype("offsets", offsets, torch.int32)
        expect_contiguous(offsets=offsets)
        expect_same_device(table=table, offsets=offsets)
    arguments = (table, rows, start, counts, capacity)
    if use_triton(impl, table):
        import specdec_kernels.kv_index.ragged_kernel as kernel

        return kernel.read_table(*arguments, fill=fill, dtype=dtype, offsets=offsets, out=out)
    return reference.read_table(*arguments, fill=fill, dtype=dtype, offsets=offsets, out=out)


def write_table(
    table: torch.Tensor,
    rows: torch.Tensor,
    start: torch.Tensor,
    counts: torch.Tensor,
    values: torch.Tensor,
    impl: str = "auto",
) -> None:
    """Put the values of every request at columns start, start + 1, ... of its table row, in place.

    Args:
        table: [R, W] int32, slots of positions (or page ids); changed in place.
        rows: [B] int32 or int64, the row of each request. Requests that write must have different rows, or
            ranges that do not meet.
        start: [B] int32 or int64, first column.
        counts: [B] int32 or int64, values of each request.
        values: [M] int32 or int64, the requests' values one behind the other; values behind the last row are
            not read, nothing is written outside the table.
        impl: `auto`, `triton` or `reference`.

    Raises:
        ValueError: wrong shape, dtype, strides or devices.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    check_token_table(table, rows, start=start, counts=counts)
    check_requests(values=values)
    expect_same_device(table=table, values=values)
    if use_triton(impl, table):
        import specdec_kernels.kv_index.ragged_kernel as kernel

        return kernel.write_table(table, rows, start, counts, values)
    return reference.write_table(table, rows, start, counts, values)


def compact(
    index: torch.Tensor,
    source: torch.Tensor | None = None,
    *,
    fill: int = 0,
    out: torch.Tensor | None = None,
    impl: str = "auto",
) -> Compacted:
    """Entries that are not negative, moved to the front in their order; one pass over the entries.

    Args:
        index: [M] int32 or int64; a negative entry is dropped.
        source: [S] int32 or int64 to read: kept entry i becomes source[index[i]], and index[i] must be below
            S (an entry that is not gives `fill`). By default the entry itself.
        fill: what stands behind the kept entries.
        out: [capacity] to write instead of a new tensor of M entries; kept entries from `capacity` on are
            dropped, and entries behind the kept ones keep their contents.
        impl: `auto`, `triton` or `reference`.

    Returns:
        Compacted: values [M] int64, num_kept [1] int32.

    Raises:
        ValueError: wrong shape, dtype, strides or devices.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    check_requests(index=index)
    if source is not None:
        check_requests(source=source)
        expect_same_device(index=index, source=source)
    check_out("out", out, index, (None,))
    if use_triton(impl, index):
        import specdec_kernels.kv_index.ragged_kernel as kernel

        return kernel.compact(index, source, fill=fill, out=out)
    return reference.compact(index, source, fill=fill, out=out)


def filter_rows(
    values: torch.Tensor,
    counts: torch.Tensor,
    kept: torch.Tensor,
    *,
    fill: int = 0,
    out: torch.Tensor | None = None,
    impl: str = "auto",
) -> RaggedValues:
    """The first `kept` values of every ragged row, moved together: finished requests keep none.

    Args:
        values: [M] int32 or int64, rows one behind the other.
        counts: [B] int32 or int64, values of each row.
        kept: [B] int32 or int64, values to keep of each row, at most `counts`.
        fill: what stands behind the last row.
        out: [capacity] to write instead of a new tensor of M entries; entries that no row owns keep their
            contents. It must not be `values`.
        impl: `auto`, `triton` or `reference`.

    Returns:
        RaggedValues: offsets [B + 1] int32 of the kept rows, values int64.

    Raises:
        ValueError: wrong shape, dtype, strides or devices.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    check_requests(counts=counts, kept=kept)
    check_requests(values=values)
    expect_same_device(values=values, counts=counts)
    check_out("out", out, values, (None,))
    if use_triton(impl, values):
        import specdec_kernels.kv_index.ragged_kernel as kernel

        return kernel.filter_rows(values, counts, kept, fill=fill, out=out)
    return reference.filter_rows(values, counts, kept, fill=fill, out=out)
