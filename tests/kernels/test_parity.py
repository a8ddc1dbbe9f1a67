"""Every case of every family: the kernel computes what the reference defines.

Integers must agree exactly. Floats may err twice as much as the reference itself does in the kernel's precision, both
measured against a float64 run of the reference, plus a few roundings of the largest value, because the kernel sums in
another order. A number on the way that lies where two codes meet may have either. Where a reference takes no float64,
its own result stands for the truth; `COMPARISON` of a family says which. Outputs start as NaN or a sentinel, and in the
interpreter every load and store is checked. On a GPU the same cases run compiled, in float32 and in bfloat16.

One family alone: `python -m pytest -q tests/kernels/test_parity.py -k kv_write`.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from importlib import import_module
from inspect import Parameter, isclass, signature
from typing import Any

import pytest
import torch

from specdec_kernels import FAMILIES, parity
from specdec_kernels.cases import Case, Maker, comparison_of
from tests.kernels import small_tiles
from tests.kernels.guard import guarded, poisoned

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = (torch.float32, torch.bfloat16) if ON_GPU else (torch.float32,)
CASES = [
    pytest.param(family, case, dtype, id=f"{family}-{case.name}-{str(dtype)[6:]}")
    for family in FAMILIES
    for case in import_module(f"specdec_kernels.{family}.cases").CASES
    for dtype in DTYPES
    if "huge" not in case.tags and (ON_GPU or "large" not in case.tags)
]

SMALL = [
    pytest.param(family, case, id=f"{family}-{case.name}-small")
    for family in small_tiles.FAMILIES
    for case in import_module(f"specdec_kernels.{family}.cases").CASES
    if not (case.tags or case.gate or case.bench)
]
EXACT = [family for family in FAMILIES if comparison_of(family).float64]


def flatten(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors inside nested tuples, lists and dicts, each with the name of its place."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif hasattr(value, "_asdict"):
        yield from flatten(name, value._asdict())
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from flatten(f"{name}.{key}", item)
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from flatten(f"{name}[{index}]", item)


def rebuilt(value: Any, floats: torch.dtype | None) -> Any:
    """A deep copy with the same strides; floating tensors in the type `floats` if one is given."""
    if isinstance(value, torch.Tensor):
        wanted = floats if floats is not None and value.is_floating_point() else value.dtype
        copy = torch.empty_strided(value.size(), value.stride(), dtype=wanted, device=value.device)
        return copy.copy_(value)
    if hasattr(value, "_asdict"):
        return type(value)(*(rebuilt(item, floats) for item in value))
    if isinstance(value, dict):
        return {key: rebuilt(item, floats) for key, item in value.items()}
    return value


def outcome(function: Any, inputs: dict[str, Any], impl: str) -> dict[str, torch.Tensor]:
    """Everything that the call returns or may have changed: its result and all tensor arguments."""
    result = function(**inputs, impl=impl)
    return dict(flatten("result", result)) | dict(flatten("argument", inputs))


def wide(values: torch.Tensor) -> torch.Tensor:
    """e4m3 values as float32, which holds them exactly: torch does little arithmetic in 8 bits."""
    return values.float() if values.is_floating_point() and values.element_size() == 1 else values


def identical(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal entry by entry, NaN equal to NaN."""
    left, right = wide(left), wide(right)
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def assert_as_accurate(
    name: str,
    kernel: torch.Tensor,
    eager: torch.Tensor,
    truth: torch.Tensor,
    allowed_roundings: int,
    unsettled: torch.Tensor | None = None,
) -> None:
    """Kernel error <= 2 * eager error + `allowed_roundings` of the largest value; same NaN and infinities. An error is
    what exceeds `unsettled`, how far each entry moves where a number on the way has two codes."""
    rounding = torch.finfo(kernel.dtype).eps
    kernel, eager, truth = wide(kernel), wide(eager), wide(truth)
    finite = truth.isfinite()
    assert torch.equal(kernel.isfinite(), finite), f"{name}: finite in other places than the reference"
    assert identical(kernel[~finite].double(), truth[~finite].double()), f"{name}: other infinities or NaN"
    if not finite.any():
        return
    kernel_error, eager_error = (
        ((side.double() - truth.double()).abs() - (0.0 if unsettled is None else unsettled))[finite].max().clamp(min=0)
        for side in (kernel, eager)
    )
    largest = truth[finite].abs().max().item()
    bound = 2 * eager_error + allowed_roundings * rounding * largest
    assert kernel_error <= bound, f"{name}: error {kernel_error:.3g} over {bound:.3g} (eager {eager_error:.3g})"


@pytest.mark.parametrize("family, case, dtype", CASES)
def test_kernel_is_the_reference(family: str, case: Case, dtype: torch.dtype) -> None:
    function = getattr(import_module(f"specdec_kernels.{family}"), case.function)
    inputs = case.build(Maker.seeded(DEVICE, dtype))
    comparison = comparison_of(family)
    if "large" in case.tags and case.function in comparison.draws:
        # A few rows of so many tokens may draw another one than the reference.
        assert parity.check(function, inputs, comparison).problem is None
        return
    roundings = comparison.compiled_roundings if ON_GPU else comparison.interpreted_roundings
    exact = rebuilt(inputs, torch.float64) if comparison.float64 else None
    eager = outcome(function, rebuilt(inputs, None), "reference")
    truth = outcome(function, exact, "reference") if exact is not None else eager
    unsettled = comparison.unsettled.get(case.function)
    moved = {} if unsettled is None else {"result": unsettled(inputs, exact)}
    with ExitStack() as stack:
        stack.enter_context(poisoned())
        if not ON_GPU:
            stack.enter_context(guarded())
        kernel = outcome(function, inputs, "triton")
    assert kernel.keys() == eager.keys()
    for name, actual in kernel.items():
        expected = eager[name]
        assert actual.dtype == expected.dtype and actual.shape == expected.shape, name
        if actual.is_floating_point() and not identical(actual, expected):
            assert_as_accurate(name, actual, expected, truth[name], roundings, moved.get(name))
        elif not actual.is_floating_point():
            assert torch.equal(actual, expected), f"{name}:\n{actual}\nexpected\n{expected}"


@pytest.mark.skipif(ON_GPU, reason="the tiles that are made small are the interpreter's")
@pytest.mark.parametrize("family, case", SMALL)
def test_small_tiles_have_the_same_results(monkeypatch: pytest.MonkeyPatch, family: str, case: Case) -> None:
    """The interpreter's tiles hold the inputs of most cases whole, so that nothing passes from one to the next."""
    small_tiles.make_tiles_small(monkeypatch)
    test_kernel_is_the_reference(family, case, torch.float32)


@pytest.mark.parametrize("family", [pytest.param(name, id=f"{name}-float64") for name in EXACT])
def test_the_truth_is_finer_than_float32(family: str) -> None:
    """A reference that computed in float32 what it is given in float64 would allow a kernel every error twice."""
    cases = import_module(f"specdec_kernels.{family}.cases").CASES
    writes, finer = set(), set()
    for case in cases:
        if case.function in finer or case.tags or case.gate or case.bench:
            continue
        inputs = rebuilt(case.build(Maker.seeded(DEVICE)), torch.float64)
        before = dict(flatten("argument", rebuilt(inputs, None)))
        after = outcome(getattr(import_module(f"specdec_kernels.{family}"), case.function), inputs, "reference")
        for name, value in after.items():
            if value.dtype != torch.float64 or (name in before and identical(value, before[name])):
                continue
            writes.add(case.function)
            if not identical(value, value.float().double()):
                finer.add(case.function)
    assert writes and finer == writes


@pytest.fixture(autouse=True)
def memory_for_the_next() -> Iterator[None]:
    """The large cases need most of the memory of a GPU, one at a time."""
    yield
    if ON_GPU:
        torch.cuda.empty_cache()


def has_kernel(public: Any) -> bool:
    """Functions with two implementations take inputs by position and an `impl`."""
    if not callable(public) or isclass(public):
        return False
    parameters = signature(public).parameters
    return "impl" in parameters and next(iter(parameters.values())).kind is not Parameter.KEYWORD_ONLY


def test_every_family_has_cases_of_every_use() -> None:
    for family in FAMILIES:
        module = import_module(f"specdec_kernels.{family}")
        cases = import_module(f"specdec_kernels.{family}.cases").CASES
        functions = {name for name in module.__all__ if has_kernel(getattr(module, name))}
        cased = {case.function for case in cases}
        assert cased <= functions, f"{family}: a case of no public function"
        # Published operations that are plain torch have no kernel: test_compat_sglang.py tests them.
        assert cased == functions or family.startswith("compat."), f"{family}: a public function without a case"
        assert any(case.gate for case in cases), f"{family}: nothing for the compile gate"
        assert any(case.bench for case in cases), f"{family}: nothing for the benchmark"
        assert all(case.catches for case in cases), f"{family}: a case that does not say what it catches"
        assert len({case.name for case in cases}) == len(cases), f"{family}: two cases of one name"
