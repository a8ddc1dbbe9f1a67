"""Arguments of paged attention besides its queries and keys, and the tile schedule of a forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from specdec_kernels.attention.configs import AttentionConfig

MODES = ("chain", "block", "tree")
MAX_HEAD_DIM = 256
MAX_PAGE_SIZE = 256


class AttentionMetadata(NamedTuple):
    """Shared by the layers of a forward. Layers of another window have their own. Query row i is at slot L + i and sees
    the prefix [0, L) and, of the draft, slot L + j when `mode="chain"`: j <= i; `mode="block"`: j < q_lens;
    `mode="tree"`: bit j of the row's mask words is set."""

    page_table: Annotated[Tensor, "B * int32"]
    """Rows may be strided; entries past the last used page are never read as page numbers."""
    lengths: Annotated[Tensor, "B int64"]
    """Committed lengths L, without the draft."""
    mode: str
    """One of `MODES`."""
    mask: Annotated[Tensor | None, "B N M/64 int64"] = None
    """Words, only with `mode="tree"`; bit j of row i: the row sees slot j."""
    q_lens: Annotated[Tensor | None, "B int32"] = None
    """Rows in use, default N for all. Rows past it are zeros with lse -inf."""
    tree_width: int | None = None
    """M draft slots after L that the mask describes. The rows may then be any nodes of the draft, fewer or in
    another order than the slots. Default: row i is slot i, and M = N."""
    max_length: int | None = None
    """Host-side bound on the last key's position + 1, default P * page_size. It sizes the launch; a longer request is
    truncated."""
    window: int | None = None
    """A key is seen only if position of the row - position of the key < window. Slot j is at position L + j, in a
    tree at L + depth."""
    depths: Annotated[Tensor | None, "B M int32"] = None
    """Depth of each draft slot, only with `mode="tree"` and a window."""
    row_depths: Annotated[Tensor | None, "B N int32"] = None
    """Depth of each query row, default `depths`; needed where M is not N."""
    paths: Annotated[Tensor | None, "B N * int32"] = None
    """Only with `mode="tree"`: the slots that each row sees in the order of the text, -1 after the
    last; what `mask_paths` makes of the mask. A batch-invariant call of a tree needs it."""
    soft_cap: float | None = None
    """Scores s become soft_cap * tanh(s / soft_cap)."""
    scale: float | None = None
    """Multiplies q . k, default D ** -0.5."""

    def used_rows(self, num_nodes: int) -> Tensor:
        """[B] int64 query rows in use."""
        if self.q_lens is None:
            return torch.full_like(self.lengths, num_nodes)
        return self.q_lens.to(torch.int64).clamp(0, num_nodes)

    def used_slots(self, num_nodes: int) -> Tensor:
        """[B] int64 draft slots after the prefix; none for a request without rows."""
        used = self.used_rows(num_nodes)
        return used if self.tree_width is None else (used > 0) * self.tree_width

    def of_requests(self, requests: Tensor | list[int]) -> AttentionMetadata:
        """The same for some of the requests, in the order given."""
        rows: dict[str, Any] = {
            name: value[requests].contiguous() for name, value in self._asdict().items() if isinstance(value, Tensor)
        }
        return self._replace(**rows)


class AttentionShape(NamedTuple):
    """Sizes of q [B, num_nodes, heads, head_dim] and kv [2, pages, page_size, kv_heads, head_dim], and their types."""

    num_nodes: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype

    @property
    def problem(self) -> str | None:
        """Why `paged_attention` cannot serve calls of this shape, or None."""
        if self.head_dim % 16 or not 16 <= self.head_dim <= MAX_HEAD_DIM:
            return f"expected a head dimension in multiples of 16 up to {MAX_HEAD_DIM}, got {self.head_dim}"
        if not 1 <= self.page_size <= MAX_PAGE_SIZE:
            return f"expected pages of 1 to {MAX_PAGE_SIZE} tokens, got {self.page_size}"
        return None

    @classmethod
    def of(cls, q: Tensor, kv: Tensor) -> AttentionShape:
        """The shape of a call."""
        _, num_nodes, heads, head_dim = q.shape
        return cls(num_nodes, heads, kv.shape[3], head_dim, kv.shape[2], q.dtype, kv.dtype)


class LayerScales(NamedTuple):
    """Of one layer: [H] float32 sinks, and scales of its stored keys and values, a number or [H_kv]."""

    sinks: Tensor | None = None
    k_scale: float | Tensor = 1.0
    v_scale: float | Tensor = 1.0

    @property
    def of_heads(self) -> tuple[Tensor | None, ...]:
        """Sinks, and the scales of keys and values that are tensors: one number a head, or None."""
        scales = (self.k_scale, self.v_scale)
        return (self.sinks, *(scale if isinstance(scale, Tensor) else None for scale in scales))


class SplitOptions(NamedTuple):
    """Options of a call that split its keys, see `paged_attention`."""

    split_tokens: int | None = None
    tuning: Mapping[str, Any] | None = None
    batch_invariant: bool = False
    in_order: bool | None = None


class WorkShape(NamedTuple):
    """How a call's work is divided, besides by the lengths. A tile schedule is for calls of one shape."""

    batch: int
    num_nodes: int
    group: int
    num_slots: int
    all_slots: bool
    max_length: int
    window: int | None
    block_m: int
    split_tokens: int
    first_splits: int
    longest_split: int
    max_splits: int
    num_splits: int
    fixed_splits: bool = False
    in_order: bool = False

    @property
    def row_tiles(self) -> int:
        """Tiles of `block_m` packed query rows of one (request, KV head)."""
        return -(-self.num_nodes * self.group // self.block_m)

    def programs(self, kv_heads: int, listed: bool, resident: int) -> int:
        """Programs of a call; at most `resident` with a tile schedule."""
        programs = self.batch * self.num_splits * self.row_tiles * kv_heads
        return min(programs, resident) if listed else programs

    def splits_of(self, keys: int) -> int:
        """Splits of a request of which a row may see `keys` keys, before their length is rounded."""
        rounds = (keys // self.first_splits + self.longest_split // 2) // self.longest_split
        rounds = max(1, min(rounds, self.max_splits // self.first_splits))
        return min(-(-keys // self.split_tokens), rounds * self.first_splits, self.max_splits)

    @property
    def sizes(self) -> tuple[Any, ...]:
        """The kernels' num_slots, split_tokens, first_splits, longest_split, max_splits, max_length and window."""
        lengths = (self.split_tokens, self.first_splits, self.longest_split, self.max_splits)
        return (self.num_slots, *lengths, self.max_length, self.window)


class TileSchedule(NamedTuple):
    """Work items of a forward on the device, made by `plan_attention` and used by every layer of the same shape.

    items: [capacity, 3] int32 (request, tile of query rows, split of the keys), the first `num_items` in use, the rest
        zero.
    offsets: [B + 1] int32 first partial result of each request; the last entry is their number.
    num_items: [1] int32.
    """

    items: Tensor
    offsets: Tensor
    num_items: Tensor
    shape: WorkShape


class AttentionCall(NamedTuple):
    """A call as both implementations get it: checked, every default filled in."""

    q: Tensor
    kv: Tensor
    metadata: AttentionMetadata
    scales: LayerScales
    work: WorkShape
    config: AttentionConfig
    tile_schedule: TileSchedule | None

    @property
    def along_paths(self) -> bool:
        """Whether each node of a tree goes on with a text of its own, see `kernel_tree`."""
        return self.work.fixed_splits and self.metadata.mode == "tree"
