"""Matrix products of the interpreter that give a row the same bits wherever it stands in its tile."""

from typing import Any

import pytest
import torch


def add_products_in_order(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter add products one by one along the inner dimension, as a tensor core does group by group. Its
    own matrix product is NumPy's, which rounds the rows of a tile differently. On a GPU this does nothing."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    def dot(self: Any, a: Any, b: Any, acc: Any, *precision: Any) -> Any:
        total = acc.data.copy()
        left, right = a.data.astype(total.dtype), b.data.astype(total.dtype)
        for k in range(left.shape[1]):
            total += left[:, k, None] * right[k]
        return interpreter.TensorHandle(total, acc.dtype.scalar)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
