"""A text and a run that nobody stopped, made once for all tests of the training command."""

import pytest

from .commands import TINY, train


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"".join(b"line %04d: the quick brown fox jumps over the lazy dog\n" % i for i in range(300)))
    return path


@pytest.fixture(scope="session")
def reference(text, tmp_path_factory):
    """A run that nobody killed; its output is in run.out."""
    run = tmp_path_factory.mktemp("runs") / "reference"
    code, out, err = train(*TINY, "--data", text, "--out", run, "--ledger")
    assert (code, err) == (0, ""), err
    (run / "output.txt").write_text(out)
    return run
