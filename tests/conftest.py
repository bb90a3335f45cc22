"""What every test may use: `ranks`, a pool of real processes (see tests/ranks.py)."""

import os
import tempfile

import pytest
import torch.distributed as dist

from tests.ranks import RankPool

# What tests and the notebooks they run note of a learner's progress is not that of whoever runs them.
_DATA = tempfile.TemporaryDirectory(prefix="fsdp-ref-data-")
os.environ["FSDP_REF_DATA"] = _DATA.name


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
