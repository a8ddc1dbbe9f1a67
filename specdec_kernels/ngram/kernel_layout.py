"""The constants of `types` as device code needs them: rows, planes and entries of the store's tensors."""

from __future__ import annotations

import triton.language as tl

from specdec_kernels.ngram import types

PARENT, TOKEN, COUNT, HEAD, NEXT, FREE, WORK = map(tl.constexpr, types.INT_ROWS)
STAMP, USED = map(tl.constexpr, types.TIME_ROWS)
RECENT, FREQUENT = map(tl.constexpr, types.LIST_PLANES)
LIVE, EPOCH, CLOCK, BASE, CUT, NUM_WORK, FULL, NUM_FREED = map(tl.constexpr, types.COUNTERS)
ROOT, EMPTY, MAX_TOKEN = map(tl.constexpr, (types.ROOT, types.EMPTY, types.MAX_TOKEN))
HASH_FIRST, HASH_SECOND = map(tl.constexpr, (types.HASH_FIRST, types.HASH_SECOND))
AGE_BITS, MAX_AGE_BITS, NUM_BINS = map(tl.constexpr, (types.AGE_BITS, types.MAX_AGE_BITS, types.NUM_BINS))
