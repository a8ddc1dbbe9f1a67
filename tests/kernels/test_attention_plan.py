"""The work list of paged attention: it covers each key of each row once, and planned calls are the same calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_kernels.attention import paged_attention, plan_attention
from specdec_kernels.attention.cases import CASES
from specdec_kernels.attention.inputs import plan_arguments
from specdec_kernels.attention.warmup import warmup
from specdec_kernels.cases import Maker
from specdec_kernels.launch import Launch, record_launches
from tests.kernels.attention_truth import DEVICE, inputs


def planned(arguments: dict[str, Any], **options: Any) -> Any:
    arguments = arguments | options
    names = ("return_lse",)
    plan = plan_attention(**plan_arguments({k: v for k, v in arguments.items() if k not in names}), impl="triton")
    return paged_attention(**arguments, plan=plan, impl="triton")


@settings(max_examples=6)
@given(
    requests=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 6)), min_size=1, max_size=4),
    mode=st.sampled_from(["chain", "block", "tree"]),
    window=st.sampled_from([None, 20]),
    split_tokens=st.sampled_from([None, 16, 48]),
    resident=st.sampled_from([1, 5, 1000]),
    seed=st.integers(0, 1000),
)
def test_a_plan_changes_no_bit(
    requests: list[tuple[int, int]],
    mode: str,
    window: int | None,
    split_tokens: int | None,
    resident: int,
    seed: int,
) -> None:
    lengths, q_lens = zip(*requests, strict=True)
    arguments = inputs(mode, 6, lengths, seed, heads=(2, 1), q_lens=q_lens, window=window, sinks=True)
    options = dict(split_tokens=split_tokens, return_lse=True, tuning=dict(resident_programs=resident))
    plain = paged_attention(**arguments, **options, impl="triton")
    for left, right in zip(plain, planned(arguments, **options), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("plan", [False, True])
@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_the_order_of_the_batch_does_not_matter(mode: str, plan: bool) -> None:
    """Bit for bit, and so does the company a request has."""
    arguments = inputs(mode, 4, (80, 7, 0, 40), heads=(2, 1), split_tokens=32, q_lens=(4, 3, 0, 2), window=50)
    call = planned if plan else lambda a: paged_attention(**a, impl="triton")
    together = call(arguments)
    order = torch.tensor([2, 0, 3, 1], device=DEVICE)
    names = [name for name, value in arguments.items() if isinstance(value, torch.Tensor) and name != "kv"]
    assert torch.equal(call(arguments | {name: arguments[name][order] for name in names}), together[order])
    for row in range(4):
        alone = {name: arguments[name][row : row + 1].contiguous() for name in names}
        assert torch.equal(call(arguments | alone)[0], together[row])


@settings(max_examples=25)
@given(
    requests=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 70)), min_size=1, max_size=6),
    window=st.sampled_from([None, 1, 200]),
    slots=st.sampled_from([None, 90]),
    split_tokens=st.sampled_from([16, 64]),
    max_splits=st.sampled_from([2, 5, 32]),
)
def test_a_plan_covers_the_keys_once(
    requests: list[tuple[int, int]], window: int | None, slots: int | None, split_tokens: int, max_splits: int
) -> None:
    """Splits of a request are as many as the keys that its rows see need, and few enough; tiles cover its
    rows."""
    lengths, q_lens = zip(*requests, strict=True)
    tuning = dict(block_m=32, block_n=16, max_splits=max_splits)
    plan = plan_attention(
        torch.tensor(lengths, device=DEVICE),
        num_nodes=70,
        heads=4,
        kv_heads=2,
        head_dim=64,
        max_length=3100,
        q_lens=torch.tensor(q_lens, dtype=torch.int32, device=DEVICE),
        mode="tree",
        tree_width=slots,
        window=window,
        split_tokens=split_tokens,
        tuning=tuning,
        impl="reference",
    )
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
            assert 1 <= splits <= max_splits + (window is not None)
            lengths_that_fit = [split_tokens << k for k in range(20)]
            assert any(
                0 < end - (lowest // tokens + splits - 1) * tokens <= tokens * 5 // 4 for tokens in lengths_that_fit
            )
        else:
            assert not own and not splits


def test_a_plan_of_another_shape_is_refused() -> None:
    arguments = inputs("chain", 3, (40, 2), split_tokens=16)
    plan = plan_attention(**plan_arguments(arguments), impl="triton")
    with pytest.raises(ValueError, match="window 9 in the call, None in the plan"):
        paged_attention(**arguments, window=9, plan=plan, impl="triton")
    with pytest.raises(ValueError, match="heads: expected a multiple of kv_heads 2, got 3"):
        plan_attention(**(plan_arguments(arguments) | dict(heads=3)))


def _compiled(launches: list[Launch]) -> set[Any]:
    """What distinguishes compiled kernels: constants, and which arguments are absent or of which type."""
    return {
        (
            launch.kernel.__name__,
            tuple(sorted((name, str(value)) for name, value in launch.constexprs.items())),
            tuple(str(a.dtype) if isinstance(a, torch.Tensor) else type(a).__name__ for a in launch.args),
            launch.num_warps,
            launch.num_stages,
        )
        for launch in launches
    }


@pytest.mark.parametrize("chip", ["sm90", "gfx942"])
def test_warmup_compiles_what_calls_launch(chip: str) -> None:
    shipped = dict(heads=8, kv_heads=2, head_dim=128, device="cpu", ragged=(False,), planned=(False,))
    with record_launches(chip) as warmed:
        calls = warmup(**shipped, impl="triton")
        calls += warmup(**shipped, kv_dtype=torch.float8_e4m3fn, modes=("chain",), impl="triton")
        warmup(**(shipped | dict(planned=(True,))), modes=("chain",), impl="triton")
    assert calls == 4 * 5
    names = {"decode", "chain_8", "chain_16", "block_16", "tree_16", "prefill", "fp8_chain_16"}
    chosen = [case for case in CASES if case.gate and case.name.removeprefix("shipped_") in names]
    assert {case.name.removeprefix("shipped_") for case in chosen} == names
    built = [case.build(Maker.seeded("cpu", torch.bfloat16)) for case in chosen]
    with record_launches(chip) as needed:
        for arguments in built:
            paged_attention(**arguments, impl="triton")
    assert _compiled(needed) <= _compiled(warmed)


def test_warmup_runs() -> None:
    options: dict[str, Any] = dict(window=9, sinks=True, head_scales=True, max_length=100, node_counts=(1, 3))
    assert warmup(heads=2, kv_heads=1, head_dim=16, device=DEVICE, dtype=torch.float32, **options) == 3 * 2 * 4
