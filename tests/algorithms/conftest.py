"""Random drafters for the modules that ask for them by `pytestmark = pytest.mark.usefixtures("random_drafters")`."""

from __future__ import annotations

import pytest

from tests.algorithms.drafters import load_random_drafters


@pytest.fixture
def random_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    load_random_drafters(monkeypatch)
