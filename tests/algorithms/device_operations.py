"""Counts operations of torch that would launch a kernel on a GPU."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_HOST = ("_local_scalar_dense", "is_same_size")


class OperationMode(TorchDispatchMode):
    """A mode of operations that run one by one: nothing has to keep `torch.compile` away from each of them."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class DeviceOperations(OperationMode):
    """Counts operations of torch that would launch a kernel. New memory is zeroed, because recorded launches leave it
    unwritten and later operations use it as indices."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        result = func(*args, **(kwargs or {}))
        if name in _ALLOCATIONS:
            return result.zero_()
        aliased = any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)
        if not aliased and name not in _HOST:
            self.names[name] += 1
        return result
