"""Products of few rows: bits that do not depend on the number of rows, and what the parity cases cannot show."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec_kernels import projection
from specdec_kernels.all_reduce.cases import exchange_inputs
from specdec_kernels.all_reduce.reference import as_sent, packed
from specdec_kernels.cases import Maker
from specdec_kernels.launch import CHIPS, record_launches
from specdec_kernels.norm import add_rms_norm
from specdec_kernels.projection.cases import WEIGHTS, argmax_inputs, linear_inputs, normed_inputs, scaled_inputs
from specdec_kernels.projection.configs import MAX_KERNEL_ROWS, LinearConfig, linear_config, scaled_config
from specdec_kernels.projection.types import Product

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
ROWS = (1, 7, 16, 32, 64, 128)
SHAPES = [pytest.param(96, 1100, id="several splits"), pytest.param(576, 64, id="several tiles")]


@pytest.mark.parametrize("outer, inner", SHAPES)
@pytest.mark.parametrize("function", [projection.linear, projection.linear_silu_mul])
def test_a_row_has_the_same_bits_among_others(function: Any, outer: int, inner: int) -> None:
    """Also where the others are no numbers. More than 128 rows are taken by programs that add all splits themselves."""
    inputs = linear_inputs(Maker.seeded(DEVICE, DTYPE), 200, outer, inner)
    x, weight = inputs["x"], inputs["weight"]
    options: dict[str, Any] = dict(batch_invariant=True, impl="triton")
    whole = function(x, weight, **options)
    for rows in ROWS:
        assert torch.equal(function(x[:rows], weight, **options), whole[:rows]), f"{rows} rows"
    x[1:] = float("nan")
    assert torch.equal(function(x[:9], weight, **options)[0], whole[0])


@pytest.mark.parametrize("float8_x", [False, True], ids=["W8A16", "W8A8"])
@pytest.mark.parametrize("groups", [(128, 128), (1, 768)], ids=["blocks", "rows"])
def test_a_row_of_a_scaled_product_has_the_same_bits_among_others(groups: tuple[int, int], float8_x: bool) -> None:
    """Whether the product rounds x or a kernel before it."""
    inputs = scaled_inputs(Maker.seeded(DEVICE, DTYPE), 140, 256, 768, groups=groups, float8_x=float8_x)
    x, weight = inputs["x"], inputs["weight"]
    whole = projection.linear(x, weight, batch_invariant=True, impl="triton")
    for rows in (1, 17, 64):
        part = projection.linear(x[:rows], weight, batch_invariant=True, impl="triton")
        assert torch.equal(part, whole[:rows]), f"{rows} rows"


@pytest.mark.parametrize("inner", [40, 640])
def test_codes_of_x_written_before_the_product_are_those_of_the_definition(inner: int) -> None:
    x = scaled_inputs(Maker.seeded(DEVICE, DTYPE), 7, 1, inner, float8_x=True)["x"]
    codes, scales = projection.rounding.rounded_rows(x, multiple=4)
    expected, expected_scales = (torch.cat([part, part[-1:]]) for part in projection.reference.rounded(x))
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8)) and torch.equal(scales.T, expected_scales)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("float8_x", [False, True], ids=["W8A16", "W8A8"])
@pytest.mark.parametrize("bytes_", [2, 4])
def test_the_steps_of_a_scaled_product_do_not_depend_on_the_rows(chip: str, bytes_: int, float8_x: bool) -> None:
    """Each is in one group of 128 inner elements."""
    for outer, inner in [*WEIGHTS.values(), (1, 1), (45, 33), (1000, 129)]:
        configs = [scaled_config(chip, outer, inner, rows, bytes_, float8_x) for rows in (1, *ROWS, 200)]
        steps = {(config.splits, config.split_length(inner), config.block_k) for config in configs}
        assert len(steps) == 1, f"{outer} x {inner}: {steps}"
        _, length, block_k = steps.pop()
        assert block_k == 128 if float8_x and chip != "interpreter" else 128 % block_k == 0
        assert length % block_k == 0 or length == inner


def test_a_normed_row_has_the_same_bits_among_others() -> None:
    inputs = normed_inputs(Maker.seeded(DEVICE, DTYPE), 200, 96, 1100)
    options: dict[str, Any] = dict(batch_invariant=True, impl="triton")
    whole = projection.linear_add_rms_norm(**inputs, **options)
    for rows in ROWS:
        part = inputs | {name: inputs[name][:rows] for name in ("x", "residual")}
        for left, right in zip(projection.linear_add_rms_norm(**part, **options), whole, strict=True):
            assert torch.equal(left, right[:rows]), f"{rows} rows"


@pytest.mark.parametrize("inner", [64, 1100])
def test_the_fused_norm_has_the_bits_of_the_separate_one(inner: int) -> None:
    """Partial sums are added in the same order by the norm and by the last program of a tile."""
    inputs = normed_inputs(Maker.seeded(DEVICE, DTYPE), 5, 96, inner)
    product = projection.linear(inputs["x"], inputs["weight"], impl="triton")
    apart = add_rms_norm(product, inputs["residual"], inputs["norm_weight"], inputs["eps"], impl="triton")
    fused = projection.linear_add_rms_norm(**inputs, impl="triton")
    assert torch.equal(fused.normed, apart.normed) and torch.equal(fused.residual, apart.residual)


@pytest.mark.parametrize("inner", [64, 1100])
def test_few_rows_that_are_exchanged_have_the_bits_of_many_that_are_gathered(inner: int) -> None:
    """Sums of two ranks without their last bits, added in order and rounded once, by the exchange and one by one."""
    make = Maker.seeded(DEVICE, torch.float16)
    both = [normed_inputs(make, 3, 96, inner) for _ in range(2)]
    sums = [projection.linear(each["x"], each["weight"], out_dtype=torch.float32, impl="triton") for each in both]
    end = {name: both[0][name] for name in ("residual", "norm_weight", "eps")}
    for rank in range(2):
        inputs = exchange_inputs(make, 3, 96, rank=rank)
        exchange, capacity = inputs["exchange"], inputs["exchange"].rows
        first = int(exchange.offsets[rank])
        counters = exchange.memory[first + 2 * 2 * capacity * 96 :][:3]
        words = exchange.memory[first:].view(torch.int32)[(1 - rank) * capacity * 96 :][: 3 * 96]
        words.copy_(packed(sums[1 - rank], counters + 1).flatten())
        x, weight = both[rank]["x"], both[rank]["weight"]
        exchanged = projection.linear_all_reduce_add_rms_norm(x, weight, exchange, 0, *end.values(), impl="triton")
        total = (as_sent(sums[0]) + as_sent(sums[1])).half()
        gathered = add_rms_norm(total, end["residual"], end["norm_weight"], end["eps"], impl="triton")
        assert all(torch.equal(left, right) for left, right in zip(exchanged, gathered, strict=True))


@pytest.mark.parametrize("outer, inner", SHAPES)
def test_the_library_stands_in_for_the_kernel(monkeypatch: pytest.MonkeyPatch, outer: int, inner: int) -> None:
    """Where it has the kernel's bits: parts of the inner dimension, added in order, by the norm or by themselves."""
    normed = normed_inputs(Maker.seeded(DEVICE, torch.float32), 5, outer, inner)
    x, weight = normed["x"], normed["weight"]
    options: dict[str, Any] = dict(batch_invariant=True, impl="triton")
    calls = (
        lambda: projection.linear(x, weight, **options),
        lambda: projection.linear_silu_mul(x, weight, **options),
        lambda: torch.stack(projection.linear_add_rms_norm(**normed, **options)),
    )
    expected, asked = [call() for call in calls], []

    def parts(x: torch.Tensor, weight: torch.Tensor, config: LinearConfig) -> torch.Tensor:
        length = config.split_length(inner)
        found = [a @ b.t() for a, b in zip(x.split(length, 1), weight.split(length, 1), strict=True)]
        return torch.stack(found) if config.splits > 1 else found[0]

    def has_the_bits(x: torch.Tensor, weight: torch.Tensor, config: LinearConfig, product: Any) -> bool:
        asked.append(config.splits)
        torch.testing.assert_close(product(x), parts(x, weight, config), atol=1e-4, rtol=1e-4)
        return True

    monkeypatch.setattr(projection.kernel, "has_the_bits", has_the_bits)
    monkeypatch.setattr(projection.kernel, "products_of_splits", parts)
    for call, result in zip(calls, expected, strict=True):
        torch.testing.assert_close(call(), result, atol=1e-4, rtol=1e-4)
    assert len(asked) == len(calls) and (max(asked) > 1) == (inner > 1000)
    bias = torch.ones(outer, device=DEVICE)  # the kernel adds it before it rounds
    torch.testing.assert_close(projection.linear(x, weight, bias, **options), expected[0] + 1, atol=1e-4, rtol=1e-4)
    assert len(asked) == len(calls)


@pytest.mark.gpu
@pytest.mark.parametrize("outer, inner", [(6144, 4096), (4096, 4096), (4096, 12288)], ids=str)
def test_a_product_of_many_rows_has_the_bits_of_few(outer: int, inner: int) -> None:
    """The shapes of an 8B, whoever computes them; and a captured product does not compare."""
    inputs = linear_inputs(Maker.seeded(DEVICE, torch.bfloat16), 1024, outer, inner)
    x, weight = inputs["x"], inputs["weight"]
    few = torch.cat([projection.linear(rows, weight, batch_invariant=True) for rows in x.split(16)])
    for rows in (65, 96, 128, 130, 256, 512, 1024):
        assert torch.equal(projection.linear(x[:rows], weight, batch_invariant=True), few[:rows]), f"{rows} rows"
        graph, before = torch.cuda.CUDAGraph(), dict(projection.kernel_library._compared)
        with torch.cuda.graph(graph):
            found = projection.linear(x[: rows - 1], weight, batch_invariant=True)
        graph.replay()
        assert torch.equal(found, few[: rows - 1]) and projection.kernel_library._compared == before


def test_counters_are_zero_after_a_launch() -> None:
    """Three launches in a row would otherwise find no last program, or the wrong one."""
    inputs = linear_inputs(Maker.seeded(DEVICE, DTYPE), 3, 700, 1100)
    first = projection.linear(**inputs, impl="triton")
    for _ in range(3):
        assert torch.equal(projection.linear(**inputs, impl="triton"), first)
    assert not projection.device.tickets(inputs["x"].device, 1).any()


@pytest.mark.gpu
def test_a_replayed_graph_gives_the_same_bits() -> None:
    inputs = linear_inputs(Maker.seeded("cuda", torch.bfloat16), 16, 4096, 12288)
    expected = projection.linear(**inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = projection.linear(**inputs)
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


def test_half_precision_is_rounded_once() -> None:
    """float16 products of integers whose sum is no float16: one rounding, after the bias."""
    x = torch.ones(2, 300, dtype=torch.float16, device=DEVICE)
    weight = torch.full((5, 300), 7.0, dtype=torch.float16, device=DEVICE)  # 2100: above 2048 every second integer
    bias = torch.full((5,), 1.0, dtype=torch.float16, device=DEVICE)
    assert (projection.linear(x, weight, bias, impl="triton") == torch.tensor(2101.0).half()).all()


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("bytes_", [2, 4])
def test_the_cut_does_not_depend_on_the_rows(chip: str, bytes_: int) -> None:
    for outer, inner in [*WEIGHTS.values(), (1, 1), (45, 33), (1000, 129)]:
        configs = [linear_config(chip, outer, inner, rows, bytes_) for rows in (1, *ROWS, 200)]
        cuts = {(config.splits, config.split_length(inner)) for config in configs}
        assert len(cuts) == 1, f"{outer} x {inner}: {cuts}"
        splits, length = cuts.pop()
        assert (splits - 1) * length < inner <= splits * length, f"{outer} x {inner}: an empty split, or one too few"


@pytest.mark.parametrize("outer, inner", [*WEIGHTS.values(), (3072, 2560), (3072, 4224), (30000, 128)])
def test_a_program_holds_no_more_than_its_split(outer: int, inner: int) -> None:
    for rows in (1, 17):
        config = linear_config("sm90", outer, inner, rows, 2)
        assert config.resident <= inner - (config.splits - 1) * config.split_length(inner)
    assert all(linear_config(chip, outer, inner, 1, 2).resident == 0 for chip in CHIPS if chip != "sm90")
    assert (
        linear_config("sm90", outer, inner, 33, 2).resident == linear_config("sm90", outer, inner, 1, 4).resident == 0
    )


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("weight, rows", [("8b_gate_up", 3), ("8b_gate_up", 20), ("half8b_qkv", 3)])
def test_a_weight_that_is_held_has_the_bits_of_one_that_is_not(weight: str, rows: int, gated: bool) -> None:
    outer, inner = WEIGHTS[weight]
    inputs = linear_inputs(Maker.seeded(DEVICE, DTYPE), rows, outer, inner)
    outs = []
    for resident in (0, 128, 512 if rows == 3 else 256):
        config = replace(linear_config("sm90", outer, inner, rows, 2), resident=resident)
        outs.append(inputs["x"].new_empty(rows, outer // 2 if gated else outer))
        projection.kernel.launch_linear(Product(**inputs), None, outs[-1], gated, config)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 17, 32])
@pytest.mark.parametrize("outer, inner", [(6144, 4096), (4096, 4096), (4096, 12288), (192, 256)], ids=str)
def test_weights_in_a_ring_give_the_bits_of_those_in_a_pipeline(outer: int, inner: int, rows: int) -> None:
    """Also where the ring is longer than the split, and where programs of a tile add their sums."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the ring is for sm90")
    inputs = linear_inputs(Maker.seeded("cuda", torch.bfloat16), rows, outer, inner)
    config = linear_config("sm90", outer, inner, rows, 2)
    bias = torch.randn(outer, device="cuda").bfloat16()
    for shape, dtype in (((rows, outer), torch.bfloat16), ((config.splits, rows, outer), torch.float32)):
        outs = []
        for ring in (0, 3, config.ring):
            outs.append(torch.full(shape, float("nan"), device="cuda", dtype=dtype))
            added = bias if len(shape) == 2 else None
            projection.kernel.launch_linear(Product(**inputs), added, outs[-1], False, replace(config, ring=ring))
        assert config.ring and torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.gpu
def test_rows_that_begin_between_two_copies_have_the_same_bits() -> None:
    """The ring copies sixteen bytes at once."""
    inputs = linear_inputs(Maker.seeded("cuda", torch.bfloat16), 3, 4096, 4096)
    shifted = torch.empty(3 * 4096 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(3, 4096)
    assert torch.equal(projection.linear(shifted.copy_(inputs["x"]), inputs["weight"]), projection.linear(**inputs))


def test_the_first_of_equal_columns_wins_across_tiles() -> None:
    """Columns of one value, in tiles of their own; and rows whose logits are all negative or all infinite."""
    inputs = argmax_inputs(Maker.seeded(DEVICE, DTYPE), 4, 1600, 16)
    inputs["weight"][:] = -1
    inputs["weight"][[700, 1599]] = 1
    inputs["x"][:] = 1
    inputs["x"][1] = -1
    inputs["x"][2] = 0
    inputs["x"][3] = float("inf")
    inputs["weight"][0] = 0.5
    expected = torch.tensor([700, 1, 0, 0], device=DEVICE)
    assert torch.equal(projection.linear_argmax(**inputs, impl="triton"), expected)


def test_a_largest_logit_has_the_bits_of_the_logits() -> None:
    """Two columns of equal sums, whose halves stand in turn: added half by half they tie, and the first one wins."""
    inner = 1024
    assert linear_config("sm90", 64, inner, 16, 2).splits == linear_config("interpreter", 64, inner, 16, 4).splits == 2
    make = Maker.seeded(DEVICE, DTYPE)
    x, weight = make.normal(64, inner // 2).repeat(1, 2), make.normal(64, inner, scale=0.01)
    weight[33], weight[34] = make.normal(inner), 0
    weight[34] = weight[33].roll(inner // 2)
    logits = projection.linear(x, weight, impl="triton")
    assert torch.equal(logits[:, 33], logits[:, 34])
    assert torch.equal(projection.linear_argmax(x, weight, impl="triton"), logits.argmax(-1))


def test_few_rows_are_computed_by_the_kernels() -> None:
    """What goes to torch instead has the same numbers."""

    def kernels_of(rows: int) -> list[list[str]]:
        make = Maker.seeded("cpu")
        normed, exchanged = normed_inputs(make, rows, 96, 1100), exchange_inputs(make, rows, 96, capacity=rows)
        x, weight, end = normed["x"], normed["weight"], [normed[key] for key in ("residual", "norm_weight", "eps")]
        calls = (
            lambda: projection.linear(x, weight, impl="triton"),
            lambda: projection.linear_silu_mul(x, weight, impl="triton"),
            lambda: projection.linear_add_rms_norm(**normed, impl="triton"),
            lambda: projection.linear_all_reduce_add_rms_norm(x, weight, exchanged["exchange"], 0, *end, impl="triton"),
            lambda: projection.linear_argmax(x, weight, impl="triton"),
        )
        names = []
        for call in calls:
            with record_launches("sm90") as launches:
                call()
            names.append([each.kernel.__name__ for each in launches])
        return names

    product, exchange = ["_linear_kernel"], ["_all_reduce_kernel"]
    largest = ["_argmax_kernel", "_argmax_of_tiles_kernel"]
    assert kernels_of(4) == [product, product, [*product, "_norm_kernel"], [*product, *exchange], largest]
    assert kernels_of(MAX_KERNEL_ROWS + 2) == [[], ["_silu_mul_kernel"], ["_norm_kernel"], exchange, []]


def test_float64_is_computed_by_the_definition() -> None:
    maker = Maker.seeded(DEVICE, torch.float64)
    x, weight, residual = maker.normal(3, 64), maker.normal(48, 64), maker.normal(3, 48)
    found, expected = (
        projection.linear_add_rms_norm(x, weight, residual, maker.tensor([1.5] * 48, torch.float64), 1e-6, impl=impl)
        for impl in ("auto", "reference")
    )
    assert found.normed.dtype == torch.float64
    assert torch.equal(found.normed, expected.normed) and torch.equal(found.residual, expected.residual)
    # An exchange of one rank with itself.
    exchange, end = exchange_inputs(maker, 3, 48, ranks=1)["exchange"], (residual, maker.tensor([1.5] * 48, x.dtype))
    alone = projection.linear_all_reduce_add_rms_norm(x, weight, exchange, 0, *end, 1e-6)
    torch.testing.assert_close(alone.normed, expected.normed, rtol=1e-12, atol=1e-12)
