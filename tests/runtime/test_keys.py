"""Single keys of a `config.json`."""

from __future__ import annotations

from typing import Any

import pytest

from algorithms.runtime.models.config.keys import read_eos, required, write_eos


@pytest.mark.parametrize(("written", "ids"), [(None, ()), (0, (0,)), (7, (7,)), ([7, 0, 3], (7, 0, 3))])
def test_tokens_that_end_a_text(written: Any, ids: tuple[int, ...]) -> None:
    assert read_eos({"eos_token_id": written}) == ids and write_eos(ids) == written
    assert read_eos({}) == () and read_eos({"eos_token_id": [5]}) == (5,)


def test_a_required_key_may_be_zero_and_must_be_there() -> None:
    assert required({"size": 0}, "size") == 0
    for config in ({}, {"size": None}):
        with pytest.raises(ValueError, match="model config: key 'size' is missing"):
            required(config, "size")
