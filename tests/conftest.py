"""What every test may use: `ranks`, a pool of real processes (see tests/ranks.py)."""

import pytest
import torch.distributed as dist

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks():
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def no_group_left_behind():
    """A process group that a test leaves in this process would fail some other test, far from here."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("this test left a process group in the process of the tests")
