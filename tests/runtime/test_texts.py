"""The engine's store of texts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from algorithms.runtime.texts import Texts


def test_new_requests_begin_with_their_whole_text() -> None:
    """Length and last token too; what was in the rows before is kept as an ended text."""
    resources: Any = SimpleNamespace(max_batch=2, context=16, device=torch.device("cpu"), impl="reference", texts=[])
    texts, history = Texts.of(resources, 1), torch.arange(32).view(2, 16)
    for first in (100, 200):
        texts.begin(history + first, 5)
    store = texts.store
    assert store.tokens[store.slots[:2].long(), :7].tolist() == [[*range(200, 206), 0], [*range(216, 222), 0]]
    assert store.lengths[store.slots[:2].long()].tolist() == [6, 6]
    assert sorted(store.lengths.tolist()) == [0, 6, 6, 6]
