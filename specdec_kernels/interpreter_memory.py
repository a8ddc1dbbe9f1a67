"""Loads and stores of Triton's interpreter, by one gather or scatter of NumPy instead of a walk over the addresses."""

from __future__ import annotations

from typing import Any

_FEW = 160  # lanes for which the interpreter's own walk is shorter
_END = 1 << 56  # above every address of a process


class Memory:
    """The interpreter's module of memory with a faster `load` and `store`; all else is the module's own."""

    def __init__(self, numpy: Any, own: Any) -> None:
        self._numpy, self._own = numpy, own
        self._bits, self._all = numpy.bitwise_or.reduce, numpy.logical_and.reduce
        self._numbers: dict[Any, tuple[Any, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def load(self, addresses: Any, active: Any, filled: Any, kind: Any) -> Any:
        """What memory holds at the addresses of active lanes, and what `filled` holds in the others."""
        if addresses.size < _FEW or filled.dtype != kind or active.shape != addresses.shape:
            return self._own.load(addresses, active, filled, kind)
        active = active.astype(bool, copy=False)  # a mask may be a number that was cast to one bit
        every = self._all(active, axis=None)
        numbers, places = self._find(addresses if every else addresses[active], filled.dtype)
        if places is None:
            return self._own.load(addresses, active, filled, kind)
        if every:
            return numbers.take(places)  # of one layout, so that sums have one order
        found = filled.copy()
        found[active] = numbers.take(places)
        return found

    def store(self, addresses: Any, values: Any, active: Any) -> Any:
        """Active lanes write their values in order, so that the last of one address stays."""
        if addresses.size < _FEW or not addresses.shape == values.shape == active.shape:
            return self._own.store(addresses, values, active)
        active = active.astype(bool, copy=False)
        every = self._all(active, axis=None)
        numbers, places = self._find(addresses if every else addresses[active], values.dtype)
        if places is None:
            return self._own.store(addresses, values, active)
        numbers[places.ravel()] = values.ravel() if every else values[active]

    def _find(self, addresses: Any, kind: Any) -> tuple[Any, Any]:
        """All of memory as an array of one type, and the indices of the addresses; None if they are not aligned."""
        if kind not in self._numbers:
            shift = self._numpy.uint64(kind.itemsize.bit_length() - 1)
            self._numbers[kind] = self._numpy.asarray(_Region(kind)), shift
        numbers, shift = self._numbers[kind]
        if int(self._bits(addresses, axis=None)) % kind.itemsize:
            return numbers, None
        return numbers, (addresses >> shift).view(self._numpy.int64) - 1


class _Region:
    """Memory from the first address that is not 0, for NumPy."""

    def __init__(self, kind: Any) -> None:
        size = kind.itemsize
        self.__array_interface__ = {"data": (size, False), "shape": (_END // size,), "typestr": kind.str, "version": 3}
