from collections.abc import Iterator

import pytest

from tests.runs.forked import Forks


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """One process that forks the ranks of many runs."""
    with Forks() as opened:
        yield opened
