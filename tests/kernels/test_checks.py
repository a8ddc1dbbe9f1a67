"""Checks of values: what passes, and what the message says of the rest."""

from __future__ import annotations

from math import inf, nan

import pytest

from specdec_kernels.checks import expect_at_least, expect_between, expect_choice


@pytest.mark.parametrize(("value", "fits"), [(2, False), (3, True), (5, True), (6, False), (nan, False), (None, False)])
def test_a_value_is_between_its_bounds(value: float | None, fits: bool) -> None:
    if fits:
        expect_between("algo.window", value, 3, 5)
    else:
        with pytest.raises(ValueError, match=f"^algo.window: expected 3 to 5, got {value}$"):
            expect_between("algo.window", value, 3, 5)


@pytest.mark.parametrize(
    ("value", "most", "message"),
    [(0.0, 1.0, "rate: expected above 0 and at most 1.0, got 0.0"), (0, inf, "rate: expected above 0, got 0")],
)
def test_the_lower_bound_may_be_left_out(value: float, most: float, message: str) -> None:
    expect_between("rate", 1e-9, 0, most, above=True)
    expect_between("rate", most, 0, most, above=True)
    with pytest.raises(ValueError, match=f"^{message}$"):
        expect_between("rate", value, 0, most, above=True)


def test_a_value_may_be_left_open() -> None:
    expect_at_least("window", None, 3, nullable=True)
    expect_at_least("window", 3, 3, nullable=True)
    with pytest.raises(ValueError, match="^window: expected at least 3 or null, got 2$"):
        expect_at_least("window", 2, 3, nullable=True)
    with pytest.raises(ValueError, match="^window: expected at least 3, got None$"):
        expect_at_least("window", None, 3)


def test_a_choice_is_one_of_the_options() -> None:
    expect_choice("impl", "auto", ("auto", "triton"))
    with pytest.raises(ValueError, match="^impl: expected one of auto, triton, got 'cuda'$"):
        expect_choice("impl", "cuda", ("auto", "triton"))
