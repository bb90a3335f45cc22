"""Fixtures of the tests that damage a checkpoint (see damage.py)."""

import shutil

import pytest

from . import crashing
from .damage import STEP, write_good


@pytest.fixture(scope="module")
def good(ranks, tmp_path_factory):
    """A checkpoint of two ranks."""
    root = tmp_path_factory.mktemp("good")
    ranks(2, write_good, root)
    return root / STEP


@pytest.fixture
def step_dir(good, tmp_path):
    shutil.copytree(good, tmp_path / STEP)
    return tmp_path / STEP


@pytest.fixture(scope="module")
def target():
    return crashing.small(7)
