"""Keys and values of a float8 pool, for `kernel_hopper`: the producer converts their codes to float16."""

# mypy: ignore-errors
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from specdec_kernels.attention import device as d
from specdec_kernels.attention.device_hopper import WARPS, arrive_written, next_buffer, num_tiles, work_count, work_item

_CODES = gl.constexpr(4)  # in a number of 32 bits
_PART = gl.constexpr(64)  # keys: more take more registers than the producer has


@gluon.jit
def _load_codes(ptr, places, stored, quads, STEP: gl.constexpr):
    """Four codes as one number: single codes would each hold a register until they arrive."""
    return gl.load(ptr + places[:, None] * STEP + quads[None, :], mask=stored[:, None], other=0)


@gluon.jit
def _store_converted(codes, buffer):
    """Numbers in float16 of the codes [N, D / 4], stored as [N, D]."""
    first, second, third, fourth = gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; .reg .b32 front, back; mov.b32 {low, high}, $4; cvt.rn.f16x2.e4m3x2 front, low; "
        "cvt.rn.f16x2.e4m3x2 back, high; mov.b32 {$0, $1}, front; mov.b32 {$2, $3}, back; }",
        "=h,=h,=h,=h,r",
        [codes],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )
    numbers = gl.join(gl.join(first, third), gl.join(second, fourth))
    buffer.store(gl.reshape(numbers, [codes.shape[0], _CODES * codes.shape[1]]))


@gluon.jit
def convert_tiles(call, ring, NUM_BUFFERS: gl.constexpr, STATIC: gl.constexpr):
    """The producer, four warps. Codes of the next part of a tile are loaded while those of this one are converted."""
    H_KV: gl.constexpr = STATIC.H_KV
    PAGE: gl.constexpr = STATIC.PAGE
    BLOCK_N: gl.constexpr = STATIC.BLOCK_N
    PARTS: gl.constexpr = BLOCK_N // _PART
    QUADS: gl.constexpr = STATIC.D // _CODES
    STEP: gl.constexpr = H_KV * QUADS
    # Eight threads that store at once have half a row of two rows each, which the buffer's pattern lays in all banks.
    LOAD: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
    columns = gl.arange(0, _PART, gl.SliceLayout(1, LOAD))
    quads = gl.arange(0, QUADS, gl.SliceLayout(0, LOAD))
    buffer, phase = 0, 0
    count = work_count(call, STATIC)
    for turn in range(gl.cdiv(count, gl.num_programs(0))):
        item = work_item(turn, count, call, STATIC)
        stop = item.stop
        key_ptr = call.kv + item.kv_head * QUADS
        value_ptr = key_ptr + call.num_pages.to(gl.int64) * (PAGE * STEP)
        table_row = call.table + item.request * call.table_stride
        positions = item.begin + columns
        places = d.page_ids(table_row, positions, stop, PAGE).to(gl.int64) * PAGE + positions % PAGE
        pages = d.page_ids(table_row, positions + _PART, stop, PAGE)
        keys = _load_codes(key_ptr, places, positions < stop, quads, STEP)
        values = _load_codes(value_ptr, places, positions < stop, quads, STEP)
        for _index in range(gl.where(item.exists, num_tiles(item.begin, stop, BLOCK_N), 0)):
            for part in gl.static_range(PARTS):
                positions += _PART
                places = pages.to(gl.int64) * PAGE + positions % PAGE
                pages = d.page_ids(table_row, positions + _PART, stop, PAGE)
                if part == 0:
                    mbarrier.wait(ring.empty.index(buffer), 1 - phase)
                _store_converted(keys, ring.k_tiles.index(buffer).slice(part * _PART, _PART))
                keys = _load_codes(key_ptr, places, positions < stop, quads, STEP)
                if part == PARTS - 1:
                    arrive_written(ring.full.index(buffer))
                if part == 0:
                    mbarrier.wait(ring.empty.index(NUM_BUFFERS + buffer), 1 - phase)
                _store_converted(values, ring.v_tiles.index(buffer).slice(part * _PART, _PART))
                values = _load_codes(value_ptr, places, positions < stop, quads, STEP)
                if part == PARTS - 1:
                    arrive_written(ring.full.index(NUM_BUFFERS + buffer))
            buffer, phase = next_buffer(buffer, phase, NUM_BUFFERS)
