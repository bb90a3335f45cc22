"""The gallery in the pool: each program ends in time, is told for what it is, and leaves a pool that works and no process."""

from __future__ import annotations

import psutil
import pytest

from fsdp_ref import checkpoint
from fsdp_ref.lab import RanksFailed, start
from tests.lab.gallery.programs import ONE_IS_LOST, PROGRAMS, TOLD_BEFORE_ANYTHING_IS_SENT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
TIMEOUT, LIMIT = 3.0, 20.0


WORKS = """
from fsdp_ref.collectives import Label, all_reduce
z = torch.ones(2)
dist.all_reduce(z)
all_reduce(z, dist.group.WORLD, Label("z", "check")).wait()
assert z.tolist() == [2.0, 2.0], z
"""


@pytest.fixture(scope="module")
def lab():
    pool = start(ranks=2, timeout=TIMEOUT, limit=LIMIT)
    yield pool
    pool.stop()


def check(program, diagnosis, text: str, where: str) -> None:
    """The same of a cell and of a script: `where` is what its lines are said to be of."""
    assert diagnosis.kind is program.kind, text
    assert program.ranks in (None, diagnosis.ranks), text
    for words in program.words:
        assert words in text, text
    if program.line:
        assert f"line {program.line} of {where}" in text, text
    guilty = {f"rank {rank}" for rank in range(2) if program.ranks is None or rank in program.ranks}
    assert text.startswith(("the ranks", "ranks 0 and 1", *guilty)), "nothing of an innocent rank stands on top"


@pytest.mark.parametrize("program", TOLD_BEFORE_ANYTHING_IS_SENT, ids=lambda program: program.name)
def test_told_and_the_pool_goes_on(lab, program, tmp_path):
    before = lab.pids
    with pytest.raises(RanksFailed) as raised:
        lab.execute(f"folder = {str(tmp_path)!r}\n" if "folder" in program.text else "pass")
        lab.execute(program.text)
    check(program, raised.value.diagnosis, str(raised.value), "the cell")
    assert not raised.value.restarted and lab.pids == before
    lab.execute(WORKS)
    if "step=1" in program.text:
        assert [path.name for path in checkpoint.committed(tmp_path)] == ["step-00000001"], "the older checkpoint is the newest still"
        checkpoint.verify(tmp_path / "step-00000001")


@pytest.mark.parametrize("program", ONE_IS_LOST, ids=lambda program: program.name)
def test_told_and_the_pool_is_a_fresh_one(lab, program, tmp_path):
    before = lab.pids
    lab.execute(f"folder = {str(tmp_path)!r}\n" if "folder" in program.text else "pass")
    with pytest.raises(RanksFailed) as raised:
        lab.execute(program.text)
    check(program, raised.value.diagnosis, str(raised.value), "the cell")
    assert raised.value.restarted and not any(map(psutil.pid_exists, before))
    lab.execute(WORKS)


def test_there_are_enough():
    assert len({program.name for program in PROGRAMS}) >= 25
