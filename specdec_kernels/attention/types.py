"""What a call of paged attention receives besides its queries and keys, and the work list of a forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

MODES = ("chain", "block", "tree")
MAX_HEAD_DIM = 256
MAX_PAGE_SIZE = 256


class AttentionMetadata(NamedTuple):
    """What the layers of a forward share. Layers of another window have their own.

    Query row i stands at slot L + i and sees the prefix [0, L) and, of the draft, slot L + j when
    `mode="chain"`: j <= i; `mode="block"`: j < q_lens; `mode="tree"`: bit j of the row's mask words is set.
    """

    page_table: torch.Tensor
    """[B, P] int32; entries past the last used page are never read as page numbers."""
    lengths: torch.Tensor
    """[B] int64 committed lengths L, without the draft."""
    mode: str
    """One of `MODES`."""
    mask: torch.Tensor | None = None
    """[B, N, ceil(M / 64)] int64 words, only with `mode="tree"`; bit j of row i: the row sees slot j."""
    q_lens: torch.Tensor | None = None
    """[B] int32 rows in use, default N for all. Rows past it are zeros with lse -inf."""
    tree_width: int | None = None
    """M draft slots behind L that the mask describes. The rows may then be any nodes of the draft, fewer or in
    another order than the slots. Default: row i is slot i, and M = N."""
    max_length: int | None = None
    """Host-side bound on the last key's position + 1, default P * page_size. It sizes the launch; a longer request is
    cut."""
    window: int | None = None
    """A key is seen only if position of the row - position of the key < window. Slot j stands at position L + j, in a
    tree at L + depth."""
    depths: torch.Tensor | None = None
    """[B, M] int32 depth of each draft slot, only with `mode="tree"` and a window."""
    row_depths: torch.Tensor | None = None
    """[B, N] int32 depth of each query row, default `depths`; needed where M is not N."""
    paths: torch.Tensor | None = None
    """[B, N, P] int32, only with `mode="tree"`: the slots that each row sees in the order of the text, -1 behind the
    last; what `mask_paths` makes of the mask. A batch-invariant call of a tree needs it."""
    soft_cap: float | None = None
    """Scores s become soft_cap * tanh(s / soft_cap)."""
    scale: float | None = None
    """Multiplies q . k, default D ** -0.5."""

    def used_rows(self, num_nodes: int) -> torch.Tensor:
        """[B] int64 query rows in use."""
        if self.q_lens is None:
            return torch.full_like(self.lengths, num_nodes)
        return self.q_lens.to(torch.int64).clamp(0, num_nodes)

    def used_slots(self, num_nodes: int) -> torch.Tensor:
        """[B] int64 draft slots behind the prefix; none for a request without rows."""
        used = self.used_rows(num_nodes)
        return used if self.tree_width is None else (used > 0) * self.tree_width

    def of_requests(self, requests: torch.Tensor | list[int]) -> AttentionMetadata:
        """The same for some of the requests, in the order given."""
        rows: dict[str, Any] = {
            name: value[requests].contiguous()
            for name, value in self._asdict().items()
            if isinstance(value, torch.Tensor)
        }
        return self._replace(**rows)


class AttentionShape(NamedTuple):
    """Sizes and types of a call's tensors, known on the host before there are any.

    q is [B, num_nodes, heads, head_dim] of `dtype`, kv [2, pages, page_size, kv_heads, head_dim] of `kv_dtype`.
    """

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
    def of(cls, q: torch.Tensor, kv: torch.Tensor) -> AttentionShape:
        """The shape of a call."""
        _, num_nodes, heads, head_dim = q.shape
        return cls(num_nodes, heads, kv.shape[3], head_dim, kv.shape[2], q.dtype, kv.dtype)


class LayerScales(NamedTuple):
    """What belongs to one layer: [H] float32 sinks, and factors of its stored keys and values, a number or [H_kv]."""

    sinks: torch.Tensor | None
    k_scale: float | torch.Tensor
    v_scale: float | torch.Tensor


class Cut(NamedTuple):
    """How a call asks for its keys to be cut, see `paged_attention`."""

    split_tokens: int | None = None
    tuning: Mapping[str, Any] | None = None
    batch_invariant: bool = False
    in_order: bool | None = None


class WorkShape(NamedTuple):
    """How a call's work is divided, besides by the lengths. A call that divides its work otherwise refuses the list."""

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
    fixed_cut: bool = False
    in_order: bool = False

    @property
    def row_tiles(self) -> int:
        """Tiles of `block_m` packed query rows of one (request, KV head)."""
        return -(-self.num_nodes * self.group // self.block_m)

    def programs(self, kv_heads: int, listed: bool, resident: int) -> int:
        """Programs of a call; at most `resident` walk a list."""
        programs = self.batch * self.num_splits * self.row_tiles * kv_heads
        return min(programs, resident) if listed else programs

    def splits_of(self, keys: int) -> int:
        """Splits of a request of which a row may see so many keys, before their length is rounded."""
        rounds = (keys // self.first_splits + self.longest_split // 2) // self.longest_split
        rounds = max(1, min(rounds, self.max_splits // self.first_splits))
        return min(-(-keys // self.split_tokens), rounds * self.first_splits, self.max_splits)

    @property
    def cut(self) -> tuple[Any, ...]:
        """What the kernels call num_slots, split_tokens, first_splits, longest_split, max_splits, max_length and
        window."""
        lengths = (self.split_tokens, self.first_splits, self.longest_split, self.max_splits)
        return (self.num_slots, *lengths, self.max_length, self.window)


class WorkList(NamedTuple):
    """Device-side work list, made once per forward by `plan_attention` and used by every layer of the same shape.

    items: [capacity, 3] int32 rows (request, tile of query rows, split of the keys), the first `num_items` in
        use, the rest zero.
    offsets: [B + 1] int32 first partial result of each request; the last entry is their number.
    num_items: [1] int32.
    """

    items: torch.Tensor
    offsets: torch.Tensor
    num_items: torch.Tensor
    shape: WorkShape
