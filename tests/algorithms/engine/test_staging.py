"""What the host tells the device arrives, whole and unmixed."""

import numpy as np
import torch

from algorithms.engine.transfers import NUM_BUFFERS, Staging


def test_what_is_staged_arrives() -> None:
    """Fields of any dtype and shape, side by side; a buffer that is on its way is not the one that is written."""
    fields = {"a": ((3,), torch.int32), "none": ((0, 4), torch.int64), "b": ((2, 5), torch.int64)}
    staging = Staging(fields, torch.device("cpu"))
    written = []
    for turn in range(NUM_BUFFERS + 1):
        arrays = staging.arrays()
        written.append(arrays["a"])
        arrays["a"][:], arrays["b"][:] = turn, np.arange(10).reshape(2, 5) - turn
        staging.send()
        assert staging.tensors["a"].tolist() == [turn] * 3
        assert torch.equal(staging.tensors["b"], torch.arange(10).view(2, 5) - turn)
    assert len({id(array) for array in written}) == NUM_BUFFERS
    for name, (shape, dtype) in fields.items():
        tensor = staging.tensors[name]
        assert (tensor.shape, tensor.dtype) == (shape, dtype) and tensor.storage_offset() * dtype.itemsize % 128 == 0
