"""Loads of Triton's interpreter, by one gather of NumPy instead of a walk from address to address."""

from __future__ import annotations

from typing import Any

_FEW = 48  # lanes for which the interpreter's own walk is shorter


class Memory:
    """The interpreter's module of memory with a faster `load`; all else is the module's own."""

    def __init__(self, numpy: Any, own: Any) -> None:
        self._numpy, self._own = numpy, own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def load(self, addresses: Any, active: Any, filled: Any, kind: Any) -> Any:
        """What memory holds at the addresses of active lanes, and what `filled` holds in the others."""
        if addresses.size < _FEW or filled.dtype != kind or active.shape != addresses.shape:
            return self._own.load(addresses, active, filled, kind)
        active = active.astype(bool, copy=False)  # a mask may be a number that was cast to one bit
        every = active.all()
        used = addresses if every else addresses[active]
        if not used.size:
            return filled.copy()
        first, size = int(used.min()), filled.itemsize
        places = used - self._numpy.uint64(first)
        if int(self._numpy.bitwise_or.reduce(places, axis=None)) % size:  # not all in one array
            return self._own.load(addresses, active, filled, kind)
        places = (places // self._numpy.uint64(size)).view(self._numpy.int64)
        seen = self._numpy.asarray(_Region(first, int(places.max()) + 1, filled.dtype))
        if every:
            return self._numpy.ascontiguousarray(seen[places])  # of one layout, so that sums have one order
        found = filled.copy()
        found[active] = seen[places]
        return found


class _Region:
    """Numbers of one type from an address on, for NumPy."""

    def __init__(self, address: int, count: int, kind: Any) -> None:
        self.__array_interface__ = {"data": (address, True), "shape": (count,), "typestr": kind.str, "version": 3}
