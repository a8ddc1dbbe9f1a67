"""Checks of values: what passes, and what the message says of the rest."""

from math import inf, nan
from typing import Annotated, NamedTuple

import pytest
import torch

from specdec_kernels.checks import expect_at_least, expect_between, expect_choice, expect_fields


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


class Call(NamedTuple):
    tokens: Annotated[torch.Tensor, "B N int64"]
    mask: Annotated[torch.Tensor | None, "B N N/64 int32|int64"] = None
    ends: Annotated[torch.Tensor | None, "B+1 tokens"] = None
    plain: int = 0


def test_fields_have_their_declared_forms() -> None:
    tokens = torch.zeros(2, 70, dtype=torch.int64)
    expect_fields(Call(tokens, torch.zeros(2, 70, 2, dtype=torch.int32), torch.zeros(3).long()), B=2)
    for call, sizes, message in (
        (Call(tokens), dict(B=3), r"tokens: expected shape \[3, 70\], got \[2, 70\]"),
        (Call(tokens[0]), {}, r"tokens: expected shape \[\*, \*\], got \[70\]"),
        (Call(tokens.float()), {}, "tokens: expected dtype torch.int64, got torch.float32"),
        (Call(tokens[:, ::2]), {}, "tokens: expected a contiguous tensor"),
        (Call(tokens, torch.zeros(2, 70, 1).long()), {}, r"mask: expected shape \[2, 70, 2\], got \[2, 70, 1\]"),
        (Call(tokens, torch.zeros(2, 70, 2)), {}, "mask: expected dtype torch.int32 or torch.int64, got"),
        (Call(tokens, ends=torch.zeros(2).long()), {}, r"ends: expected shape \[3\], got \[2\]"),
        (Call(tokens, ends=torch.zeros(3)), {}, "ends: expected dtype torch.int64, got torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            expect_fields(call, **sizes)
    expect_fields(Call(torch.zeros(4, 80).long()[:, :70]), strided=("tokens",))
    with pytest.raises(ValueError, match="tokens: expected stride 1 in the last dimension"):
        expect_fields(Call(tokens[:, ::2]), strided=("tokens",))
