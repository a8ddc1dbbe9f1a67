"""Both implementations, for tests of what each of them must do."""

import pytest


@pytest.fixture(params=["reference", "triton"], scope="module")
def impl(request: pytest.FixtureRequest) -> str:
    return str(request.param)
