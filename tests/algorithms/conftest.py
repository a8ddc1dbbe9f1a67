"""Random drafters for the modules that ask for them by `pytestmark = pytest.mark.usefixtures("random_drafters")`."""

from collections.abc import Iterator

import pytest

from tests.algorithms.drafters import load_random_drafters
from tests.algorithms.toy import time_once


@pytest.fixture
def random_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    load_random_drafters(monkeypatch)


@pytest.fixture(autouse=True, scope="session")
def steps_timed_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        time_once(patch)
        yield
