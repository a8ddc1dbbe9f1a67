"""The tile schedule of paged attention: it covers each key of each row once, and planned calls are the same calls."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_kernels import attention
from specdec_kernels.attention.cases_inputs import plan_arguments
from specdec_kernels.attention.types import WorkShape
from specdec_kernels.launch import record_launches
from tests.kernels.attention_truth import DEVICE, inputs


def planned(arguments: dict[str, Any], function: Any = attention.paged_attention) -> Any:
    tile_schedule = attention.plan_attention(**plan_arguments(arguments), impl="triton")
    return function(**arguments, tile_schedule=tile_schedule, impl="triton")


@settings(max_examples=6)
@given(
    requests=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 6)), min_size=1, max_size=4),
    mode=st.sampled_from(["chain", "block", "tree"]),
    window=st.sampled_from([None, 20]),
    split_tokens=st.sampled_from([None, 16, 48]),
    resident=st.sampled_from([1, 5, 1000]),
    seed=st.integers(0, 1000),
)
def test_a_tile_schedule_changes_no_bit(
    requests: list[tuple[int, int]], mode: str, window: int | None, split_tokens: int | None, resident: int, seed: int
) -> None:
    lengths, q_lens = zip(*requests, strict=True)
    arguments = inputs(mode, 6, lengths, seed, heads=(2, 1), q_lens=q_lens, window=window, sinks=True)
    arguments |= dict(split_tokens=split_tokens, tuning=dict(resident_programs=resident))
    plain = attention.paged_attention_with_lse(**arguments, impl="triton")
    for left, right in zip(plain, planned(arguments, attention.paged_attention_with_lse), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("plan", [False, True])
@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_the_order_of_the_batch_does_not_matter(mode: str, plan: bool) -> None:
    """Bit for bit. The other requests of the batch do not matter either."""
    arguments = inputs(mode, 4, (80, 7, 0, 40), heads=(2, 1), split_tokens=32, q_lens=(4, 3, 0, 2), window=50)
    call = planned if plan else lambda a: attention.paged_attention(**a, impl="triton")
    together = call(arguments)
    order = torch.tensor([2, 0, 3, 1], device=DEVICE)

    def only(requests: torch.Tensor) -> dict[str, Any]:
        return arguments | dict(q=arguments["q"][requests], metadata=arguments["metadata"].of_requests(requests))

    assert torch.equal(call(only(order)), together[order])
    for row in range(4):
        assert torch.equal(call(only(torch.tensor([row], device=DEVICE)))[0], together[row])


@settings(max_examples=25)
@given(
    requests=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 70)), min_size=1, max_size=6),
    window=st.sampled_from([None, 1, 200]),
    slots=st.sampled_from([None, 90]),
    split_tokens=st.sampled_from([16, 64]),
    max_splits=st.sampled_from([2, 5, 32]),
)
def test_a_tile_schedule_covers_the_keys_once(
    requests: list[tuple[int, int]], window: int | None, slots: int | None, split_tokens: int, max_splits: int
) -> None:
    """The splits of a request cover the keys that its rows see, and are few enough; tiles cover its rows."""
    lengths, q_lens = zip(*requests, strict=True)
    longest = 20 * split_tokens
    tuning = dict(block_m=32, block_n=16, first_splits=3, longest_split=longest, max_splits=max_splits)
    metadata = attention.AttentionMetadata(
        page_table=torch.zeros(len(lengths), 194, dtype=torch.int32, device=DEVICE),
        lengths=torch.tensor(lengths, device=DEVICE), mode="tree",
        q_lens=torch.tensor(q_lens, dtype=torch.int32, device=DEVICE), tree_width=slots, max_length=3100,
        window=window,
    )  # fmt: skip
    plan = attention.plan_attention(
        metadata, attention.AttentionShape(70, 4, 2, 64, 16, torch.bfloat16, torch.bfloat16),
        split_tokens=split_tokens, tuning=tuning, impl="reference",
    )  # fmt: skip
    items = plan.items[: int(plan.num_items)].tolist()
    assert len({tuple(item) for item in items}) == len(items)
    assert not plan.items[int(plan.num_items) :].any()
    offsets = plan.offsets.tolist()
    for request, (length, rows) in enumerate(requests):
        own = [item[1:] for item in items if item[0] == request]
        tiles, splits = -(-rows * 2 // 32), offsets[request + 1] - offsets[request]
        if rows:
            assert sorted(own) == [[tile, split] for tile in range(tiles) for split in range(splits)]
            end = min(length + (slots or rows), 3100)
            lowest = 0 if window is None else max(0, length - window + 1)
            span = end - lowest // (split_tokens // 8) * (split_tokens // 8)
            assert 1 <= splits <= min(max_splits, 3 * max(1, int(span / (3 * longest) + 0.5)))
            most = min(max_splits, 3 * max(1, max_splits // 3))
            assert splits == most or -(-span // splits) <= 1.5 * longest
            assert splits == 1 or -(-span // splits) > split_tokens // 2
        else:
            assert not own and not splits


@pytest.mark.parametrize("programs", [1, 8, 40, 64, 100, 160, 264, 300, 512, 5000])
def test_splits_fill_the_chip_in_whole_rounds(programs: int) -> None:
    """At most a tenth of the last round is empty, or there are many rounds. A full chip splits keys no further."""
    config = attention.configs.spread(attention.configs.AttentionConfig(64, 64, 4, 3, 128, slots=264), programs)
    rounds = programs * config.first_splits / config.slots
    assert math.ceil(rounds) <= 1.1 * rounds or rounds > 4 or config.first_splits == 16
    assert config.first_splits == 1 or rounds <= 8
    assert config.longest_split >= 2048 and (programs < 264 or config.longest_split >= 16384)


def test_short_programs_over_a_window_have_short_tiles() -> None:
    """By the window and the requests, except where bits may depend on neither; what a caller asks for stands."""

    def keys(window: int | None, sequences: int, rows: int = 64, **options: Any) -> int:
        told = options | dict(window=window, sequences=sequences)
        return attention.configs.attention_config("sm90", 128, rows, 8192, **told).block_n

    assert [keys(window, 64) for window in (1, 4096, 8448, 8449, None)] == [32, 32, 32, 64, 64]  # 64 of 264 slots
    assert [keys(window, 512) for window in (1, 128, 2048, 2049, None)] == [32, 32, 32, 64, 64]
    assert [keys(window, 512, 4) for window in (63, 64, 4096, 4097)] == [64, 32, 32, 64]
    assert keys(128, 64, batch_invariant=True) == 64 and keys(128, 64, tuning=dict(block_n=128)) == 128


@pytest.mark.parametrize("batch, num_nodes", [(1, 1), (1, 16), (8, 1), (8, 16), (8, 64), (64, 1), (64, 16)])
def test_a_draft_adds_no_round_of_splits(batch: int, num_nodes: int) -> None:
    """A prompt of 2^n tokens and the nodes behind it are cut as 2^n tokens are, so that rounds stay whole."""
    config = attention.configs.attention_config("sm90", 128, 4 * num_nodes, 1 << 20)
    config = attention.configs.spread(config, batch * 8 * -(-4 * num_nodes // config.block_m))
    cut = (config.block_m, config.split_tokens, config.first_splits, config.longest_split, config.max_splits)
    work = WorkShape(batch, num_nodes, 4, num_nodes, False, 1 << 20, None, *cut, num_splits=1)
    for exponent in range(13, 18):  # shorter requests have splits of the least length
        assert work.splits_of((1 << exponent) + num_nodes) == work.splits_of(1 << exponent)


@pytest.mark.parametrize("plan", [False, True])
def test_splits_at_the_bound_of_memory(monkeypatch: pytest.MonkeyPatch, plan: bool) -> None:
    """Where partial results of a request would take more than the bound, its splits grow; others keep their bits."""
    arguments = inputs("tree", 4, (150, 7, 90), heads=(2, 1), split_tokens=16)
    call = planned if plan else lambda a: attention.paged_attention(**a, impl="triton")
    free, heads, head_dim = call(arguments), arguments["q"].shape[2], arguments["q"].shape[3]
    monkeypatch.setattr(attention.configs, "PARTIAL_BYTES", 3 * 4 * heads * (head_dim * 4 + 4))
    bounded = call(arguments)
    torch.testing.assert_close(bounded, attention.paged_attention(**arguments, impl="reference"), rtol=3e-6, atol=3e-6)
    assert torch.equal(bounded[1], free[1]) and not torch.equal(bounded[0], free[0])


@pytest.mark.parametrize("num_nodes, splits", [(1, 30), (16, 30), (64, 15), (128, 4), (256, 1)])
def test_partial_results_are_bounded(num_nodes: int, splits: int) -> None:
    """At most 8 MiB per request, however long it is; with a tile schedule as without."""
    batch, length, heads, head_dim = 3, 1 << 17, 32, 128
    make = dict(device="meta", dtype=torch.bfloat16)
    metadata = attention.AttentionMetadata(
        torch.empty(batch, length // 16, dtype=torch.int32, device="meta"),
        torch.empty(batch, dtype=torch.int64, device="meta"),
        "chain",
    )
    q, kv = torch.empty(batch, num_nodes, heads, head_dim, **make), torch.empty(2, 9, 16, 8, head_dim, **make)
    with record_launches("sm90") as launches:
        tile_schedule = attention.plan_attention(metadata, attention.AttentionShape.of(q, kv))
        attention.paged_attention(q, kv, metadata, tile_schedule=tile_schedule)
    if splits == 1:
        assert len(launches) == 2
        return
    partial, lse = launches[2].args[:2]
    assert partial.shape == (batch * splits, num_nodes, heads, head_dim)
    assert partial.numel() * 2 + lse.numel() * 4 <= batch * attention.configs.PARTIAL_BYTES


def test_a_request_without_rows_has_no_slots() -> None:
    """Backends of other packages size their plans by it."""
    metadata = inputs("tree", 5, (20, 9, 4), tree_width=21, q_lens=(2, 0, 5))["metadata"]
    assert metadata.used_slots(5).tolist() == [21, 0, 21]
    assert metadata._replace(tree_width=None).used_slots(5).tolist() == [2, 0, 5]
