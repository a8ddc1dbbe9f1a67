"""Results of the index functions."""

from typing import Annotated, NamedTuple

from torch import Tensor

INT64_MAX = 2**63 - 1
CHUNK_UNIT = 128
"""Keys of which chunks are multiples."""


class LevelSlots(NamedTuple):
    """Positions and KV slots of all levels of a draft."""

    slots: Tensor  # [levels, B, width] int64, -1 of padding slots and where no page is held
    positions: Tensor  # [levels, B, width] int64
    counts: Tensor  # [B] int32: tokens of a level, 0 of a padding slot


class FlashInferIndices(NamedTuple):
    """Paged-KV arrays in FlashInfer's layout."""

    indptr: Annotated[Tensor, "B+1 int32"]  # request b owns indices[indptr[b] : indptr[b + 1]]
    indices: Annotated[Tensor, "P int32"]  # [B * columns] page ids, 0 after the last request and where no page is held
    last_page_len: Annotated[Tensor, "B int32"]  # tokens on the last page, 0 for an empty request


class FlashInferChunks(NamedTuple):
    """How FlashInfer's `fa2` kernel splits keys, as its plan holds it on the device. Tile t computes rows of request
    `request[t]` over chunk `chunk[t]` of its keys; the chunks of a row are merged."""

    request: Annotated[Tensor, "T int32"]  # -1 of a tile that never runs
    chunk: Annotated[Tensor, "T int32"]
    size: Annotated[Tensor, "1 int32"]  # keys of a chunk
    begins: Annotated[Tensor, "B+1 int32"]  # first partial result of each request
    ends: Annotated[Tensor, "* int32"]  # [B * N + 1]: partial results of each row follow those of the row before
    runs: Annotated[Tensor, "T uint8"]  # whether the tile has keys


class FlashAttentionIndices(NamedTuple):
    """Paged-KV arrays in FlashAttention's layout."""

    page_table: Tensor  # [B, P] int32, 0 past the request's length
    seqused_k: Tensor  # [B] int32
