"""Bits of one text: the same for a row of attention wherever it is computed, and for a row of any other kernel of a
forward whatever the number of rows."""

from typing import Any, NamedTuple

import pytest
import torch

from specdec_kernels.activation import silu_mul
from specdec_kernels.attention import AttentionMetadata, AttentionShape, mask_paths, paged_attention, plan_attention
from specdec_kernels.attention.configs import fixed_borders
from specdec_kernels.cases import Maker
from specdec_kernels.kv_write import write_kv
from specdec_kernels.launch import record_launches
from specdec_kernels.norm import add_rms_norm, embed_rms_norm, rms_norm
from tests.exact_products import add_products_in_order

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
PAGE, HEADS, KV_HEADS, HEAD_DIM = 8, 2, 1, 32
LENGTH = 150
# Splits of 16 keys up to 32, of 32 up to 128, of 64 behind.
CUT: dict[str, Any] = dict(split_tokens=16, tuning=dict(first_splits=2), batch_invariant=True)
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "window, sinks and cap": dict(window=45, sinks=True, soft_cap=3.0)}


@pytest.fixture(autouse=True)
def products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    add_products_in_order(monkeypatch)


class Text(NamedTuple):
    """Queries [S, H, D], keys and values [2, S, H_kv, D] of one text, and what is true of every layer of a kind."""

    queries: torch.Tensor
    stored: torch.Tensor
    fields: dict[str, Any]
    sinks: torch.Tensor | None

    @classmethod
    def of(cls, kind: str, dtype: torch.dtype = DTYPE) -> "Text":
        make = Maker.seeded(DEVICE, dtype)
        fields = dict(KINDS[kind])
        sinks = torch.linspace(-1, 2, HEADS, device=DEVICE) if fields.pop("sinks", False) else None
        queries, stored = make.normal(LENGTH, HEADS, HEAD_DIM), make.normal(2, LENGTH, KV_HEADS, HEAD_DIM)
        return cls(queries, stored, fields, sinks)

    def call(self, starts: list[int], q: torch.Tensor, drafts: torch.Tensor | None = None, **options: Any) -> Any:
        """Attention of q [B, N, H, D] behind the first `starts` tokens of the text, one number a request. `drafts`
        [B, 2, N, H_kv, D] stand behind them, by default what the text goes on with."""
        batch, num_nodes = q.shape[:2]
        columns = -(-(LENGTH + num_nodes) // PAGE)
        kv = torch.zeros(2, batch * columns * PAGE, KV_HEADS, HEAD_DIM, dtype=q.dtype, device=DEVICE)
        for row, start in enumerate(starts):
            own = kv[:, row * columns * PAGE :]
            end = start if drafts is not None else min(LENGTH, start + num_nodes)
            own[:, :end] = self.stored[:, :end]
            if drafts is not None:
                own[:, start : start + num_nodes] = drafts[row]
        pages = torch.arange(batch * columns, dtype=torch.int32, device=DEVICE).view(batch, columns)
        known = {name: options.pop(name) for name in tuple(options) if name in AttentionMetadata._fields}
        lengths = torch.tensor(starts, device=DEVICE)
        metadata = AttentionMetadata(pages, lengths, **({"mode": "chain"} | self.fields | known))
        kv = kv.view(2, batch * columns, PAGE, KV_HEADS, HEAD_DIM)
        options = CUT | options
        if options.pop("planned", False):
            options["tile_schedule"] = plan_attention(metadata, AttentionShape.of(q, kv), **options, impl="triton")
        return paged_attention(q, kv, metadata, sinks=self.sinks, **options, impl="triton")

    def whole(self) -> torch.Tensor:
        """[S, H, D]: the prompt at once."""
        return self.call([0], self.queries[None], in_order=True)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_has_the_same_bits_in_one_piece_and_in_several(kind: str) -> None:
    """By programs that walk all splits, and by a program for each split."""
    text = Text.of(kind)
    whole = text.whole()
    assert torch.equal(text.call([0], text.queries[None], in_order=False)[0], whole)
    for start, end in ((50, 71), (71, LENGTH)):
        assert torch.equal(text.call([start], text.queries[None, start:end])[0], whole[start:end])


@pytest.mark.parametrize("kind, planned", list(zip(KINDS, (False, True), strict=True)))
def test_a_decoded_token_has_the_bits_of_the_prompt(kind: str, planned: bool) -> None:
    """One token a request, and a chain of drafts across borders of tiles and splits."""
    text = Text.of(kind)
    whole = text.whole()
    for num_nodes, starts in ((1, [0, 16, 31, 149]), (9, [12, 125])):
        q = torch.stack([text.queries[start : start + num_nodes] for start in starts])
        out = text.call(starts, q, planned=planned)
        for row, start in zip(out, starts, strict=True):
            assert torch.equal(row, whole[start : start + num_nodes]), f"{num_nodes} rows behind {start}"


def tree_of(parents: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask words [N, 1] and depths [N] of a tree."""
    mask, depths = torch.zeros(len(parents), 1, dtype=torch.int64), torch.zeros(len(parents), dtype=torch.int32)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node], depths[node] = mask[parent], depths[parent] + 1
        mask[node] |= 1 << node
    return mask.to(DEVICE), depths.to(DEVICE)


@pytest.mark.parametrize("kind, planned", list(zip(KINDS, (False, True), strict=True)))
def test_a_node_of_a_tree_has_the_bits_of_the_prompt(kind: str, planned: bool) -> None:
    """The text goes through nodes 0, 2, 5, 7 and 9 of a tree, and other drafts stand between them."""
    text = Text.of(kind)
    whole, path = text.whole(), [0, 2, 5, 7, 9]
    mask, depths = tree_of([-1, 0, 0, 1, 2, 2, 3, 5, 5, 7, 0, 9])
    num_nodes, starts = len(mask), [14, 126]
    make = Maker.seeded(DEVICE, DTYPE, seed=1)
    q = make.normal(len(starts), num_nodes, HEADS, HEAD_DIM)
    drafts = make.normal(len(starts), 2, num_nodes, KV_HEADS, HEAD_DIM)
    for row, start in enumerate(starts):
        q[row, path] = text.queries[start : start + len(path)]
        drafts[row][:, path] = text.stored[:, start : start + len(path)]
    masks = mask.expand(len(starts), -1, -1).contiguous()
    tree: dict[str, Any] = dict(mode="tree", mask=masks, paths=mask_paths(masks, 6, impl="triton"))
    if "window" in text.fields:
        tree["depths"] = depths.expand(len(starts), -1).contiguous()
    out = text.call(starts, q, drafts, planned=planned, **tree)
    for row, start in enumerate(starts):
        assert torch.equal(out[row, path], whole[start : start + len(path)]), f"behind {start}"


@pytest.mark.parametrize("nodes, most", [(3, 5), (70, 70), (140, 130)])
def test_paths_of_a_chain(nodes: int, most: int) -> None:
    """Node n of a chain sees nodes 0 to n, of which `most` are told; -1 stands behind the last."""
    bits = [(1 << (node + 1)) - 1 for node in range(nodes)]
    words = [[(seen >> 64 * word) & (1 << 64) - 1 for word in range(-(-nodes // 64))] for seen in bits]
    signed = [[word - (1 << 64) * (word >> 63) for word in row] for row in words]
    mask = torch.tensor([signed], dtype=torch.int64, device=DEVICE)
    column = torch.arange(most, dtype=torch.int32)
    expected = torch.where(column <= torch.arange(nodes)[:, None], column, -1)
    for impl in ("reference", "triton"):
        assert torch.equal(mask_paths(mask, most, impl=impl)[0].cpu(), expected), impl


def test_splits_lie_at_the_same_positions_for_any_length() -> None:
    longest = fixed_borders(1 << 20, 256, 8)
    assert len(longest) == 8 + 12 + 24 + 48 + 96 + 64
    for length in (1, 256, 257, 2048, 2049, 8192, 8193, 40000):
        borders = fixed_borders(length, 256, 8)
        assert borders == longest[: len(borders)] and borders[-1] < length
        assert length <= longest[len(borders)]


def turned(rows: int) -> tuple[torch.Tensor, ...]:
    """Queries as `write_kv` returns them, and the keys and values that it stores, of the first `rows` tokens."""
    make = Maker.seeded(DEVICE, DTYPE)
    q, k, v = make.normal(300, 4, 64), make.normal(300, 2, 64), make.normal(300, 2, 64)
    kv, rope = torch.zeros(2, 20, 16, 2, 64, dtype=DTYPE, device=DEVICE), make.normal(300, 64).float()
    slots, norms = torch.arange(300, device=DEVICE), (make.normal(64), make.normal(64))
    arguments = [tensor[:rows] for tensor in (q, k, v)]
    out = write_kv(
        *arguments, kv, slots[:rows], slots[:rows], rope, q_norm=norms[0], k_norm=norms[1], eps=1e-6, impl="triton"
    )
    return (out, *kv.flatten(1, 2)[:, :rows])


def normed(rows: int) -> tuple[torch.Tensor, ...]:
    """Norms of embeddings, of sums and of rows, and an activation, of the first `rows` rows."""
    make = Maker.seeded(DEVICE, DTYPE)
    table, weight, other = make.normal(300, 96), make.normal(96), make.normal(300, 96)
    tokens = torch.arange(rows, device=DEVICE)
    embedded = embed_rms_norm(tokens, table, weight, 1e-6, impl="triton")
    added = add_rms_norm(embedded.normed, other[:rows], weight, 1e-6, impl="triton")
    plain = rms_norm(other[:rows], weight, 1e-6, impl="triton")
    return (*embedded, *added, plain, silu_mul(other[:rows], impl="triton"))


@pytest.mark.parametrize("function", [turned, normed])
def test_kernels_of_rows_give_a_row_the_same_bits_among_others(function: Any) -> None:
    whole = function(300)
    for rows in (1, 7, 33, 257):
        for part, expected in zip(function(rows), whole, strict=True):
            assert torch.equal(part, expected[:rows]), f"{rows} rows"


@pytest.mark.gpu
@pytest.mark.parametrize("group, head_dim", [(4, 128), (4, 64), (1, 128), (8, 64)])
def test_tiles_of_more_rows_have_the_same_bits(group: int, head_dim: int) -> None:
    """A walk over all splits may take more rows at once than the programs of single splits: at the sizes of models."""
    make, length = Maker.seeded(DEVICE, DTYPE), 700
    q, kv = make.normal(1, length, 2 * group, head_dim), make.normal(2, 64, 16, 2, head_dim)
    pages = torch.arange(64, dtype=torch.int32, device=DEVICE)[None]
    metadata = AttentionMetadata(pages, torch.zeros(1, dtype=torch.int64, device=DEVICE), "chain")
    outs = [paged_attention(q, kv, metadata, batch_invariant=True, in_order=order) for order in (True, False)]
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    "batch, max_length, nodes, warps",
    [(8, 1024, 16, None), (32, 1024, 16, 4), (32, 1024, 1, 4), (32, 1 << 17, 1, None), (32, 1024, 24, 8)],
)
def test_requests_that_fill_the_chip_are_walked_in_one_piece(
    batch: int, max_length: int, nodes: int, warps: int | None
) -> None:
    """So are rows of more than one tile. A few requests, and long ones, have splits and a merge."""
    q = torch.empty(batch, nodes, 32, 128, dtype=torch.bfloat16)
    kv = torch.empty(2, 1, 16, 8, 128, dtype=torch.bfloat16)
    table = torch.zeros(batch, -(-max_length // 16), dtype=torch.int32)
    metadata = AttentionMetadata(table, torch.zeros(batch, dtype=torch.int64), "chain", max_length=max_length)
    with record_launches("sm90") as launches:
        paged_attention(q, kv, metadata, batch_invariant=True, impl="triton")
    assert len(launches) == (2 if warps is None else 1)
    assert launches[0].constexprs["IN_ORDER"] == (warps is not None)
    assert warps is None or launches[0].num_warps == warps
