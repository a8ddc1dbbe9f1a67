"""A stand-in for CUDA graphs where there is no GPU: what the work does on tensors is recorded and done again, and no
code of the host runs again."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.algorithms.device_operations import OperationMode

_READS_BACK = {"_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "masked_select"}
_tape: "Tape | None" = None


def device_work(work: Callable[[], None]) -> None:
    """Do what a kernel does to its tensors, now and in each replay."""
    with _disable_current_modes():
        work()
    if _tape is not None:
        _tape.done.append(work)


def recording() -> bool:
    return _tape is not None


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Tape(OperationMode):
    """Takes the place of CUDA graphs. Reading a tensor back while recording is an error."""

    def __init__(self, work: Callable[[], None]) -> None:
        global _tape
        super().__init__()
        for _ in range(2):
            work()
        self.done: list[Callable[[], None]] = []
        _tape = self
        try:
            with self:
                work()
        finally:
            _tape = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in _READS_BACK, f"{name} reads back inside of a graph"
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        results, given = _tensors(out), {_storage(tensor) for tensor in _tensors((args, kwargs))}
        new = [result for result in results if _storage(result) not in given]

        def again() -> None:
            for place, value in zip(results, _tensors(func(*args, **kwargs)), strict=True):
                if any(place is one for one in new):
                    place.copy_(value)

        if func._schema.is_mutable or (new and "empty" not in name):
            self.done.append(again)
        return out

    def replay(self) -> None:
        with _disable_current_modes():
            for work in self.done:
                work()


def install(monkeypatch: Any) -> None:
    """Let kernels in the interpreter be recorded, and engines without a GPU capture on tapes."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__
    monkeypatch.setattr(GridExecutor, "__call__", lambda *args, **kwargs: device_work(partial(launch, *args, **kwargs)))
    monkeypatch.setattr("tests.algorithms.toy.Replayed", Tape)
