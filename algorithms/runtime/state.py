"""The running batch: device tensors of fixed address and shape, filled from the front.

The rows in use are always 0 … n - 1, so a step runs on views of the first n rows. When a request leaves, the last row
takes its place.
"""

from __future__ import annotations

import torch

from algorithms.runtime.algorithm import Batch


class BatchState:
    """Per-request tensors for up to `max_batch` requests of up to `max_pages` pages."""

    def __init__(self, max_batch: int, max_pages: int, device: torch.device) -> None:
        self.lengths = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self.roots = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self.page_table = torch.zeros((max_batch, max_pages), dtype=torch.int32, device=device)
        self.temperature = torch.zeros(max_batch, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(max_batch, dtype=torch.int64, device=device)

    def fill(self, row: int, *, length: int, root: int, pages: list[int], temperature: float, seed: int) -> None:
        """Put a request into `row`."""
        self.lengths[row], self.roots[row] = length, root
        self.temperature[row], self.seeds[row] = temperature, seed
        # Entries past the request's pages are page 0: never read, but a valid address.
        self.page_table[row] = 0
        self.page_table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)

    def move(self, source: int, target: int) -> None:
        """Copy row `source` over row `target`."""
        for tensor in (self.lengths, self.roots, self.page_table, self.temperature, self.seeds):
            tensor[target] = tensor[source]

    def batch(self, start: int, stop: int, max_length: int) -> Batch:
        """Rows start … stop - 1 as views."""
        rows = slice(start, stop)
        return Batch(self.lengths[rows], self.roots[rows], self.page_table[rows], max_length)
