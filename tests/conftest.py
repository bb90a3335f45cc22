"""What every test may use: `ranks`, a pool of real processes (see tests/ranks.py)."""

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks():
    pool = RankPool()
    yield pool
    pool.close()
