"""The page allocator under random use: no page is lost, shared or handed out twice, and a refusal changes
nothing.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from algorithms.runtime.scheduler import OutOfPages, PageAllocator


class Allocator(RuleBasedStateMachine):
    @initialize(num_pages=st.integers(1, 24))
    def start(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages)
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, 12))
    def allocate(self, count: int) -> None:
        free = self.allocator.num_free
        if count > free:
            with pytest.raises(OutOfPages, match=f"asked for {count} pages, {free} of"):
                self.allocator.allocate(count)
            assert self.allocator.num_free == free
        else:
            self.held.append(self.allocator.allocate(count))
            assert len(self.held[-1]) == count

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.allocator.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: any(self.held))
    @rule()
    def release_twice(self) -> None:
        pages = next(pages for pages in self.held if pages)
        self.held.remove(pages)
        self.allocator.release(pages)
        free = self.allocator.num_free
        with pytest.raises(ValueError, match="not owned"):
            self.allocator.release(pages)
        assert self.allocator.num_free == free

    @invariant()
    def every_page_is_free_or_held_once(self) -> None:
        held = [page for pages in self.held for page in pages]
        assert len(set(held)) == len(held)
        assert all(0 <= page < self.allocator.num_pages for page in held)
        assert self.allocator.num_free + len(held) == self.allocator.num_pages


TestAllocator = Allocator.TestCase


def test_bad_calls() -> None:
    with pytest.raises(ValueError, match="num_pages: expected at least 1, got 0"):
        PageAllocator(0)
    allocator = PageAllocator(3)
    with pytest.raises(ValueError, match="count: expected at least 0, got -1"):
        allocator.allocate(-1)
    (page,) = allocator.allocate(1)
    with pytest.raises(ValueError, match="twice"):
        allocator.release([page, page])
    with pytest.raises(ValueError, match="not owned"):
        allocator.release([page, 99])
    assert allocator.num_free == 2
