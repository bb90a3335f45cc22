"""A save that dies or fails at any operation leaves the old checkpoints whole, and the next save works."""

import errno
import os
import shutil
import warnings

import pytest

from fsdp_ref import checkpoint
from fsdp_ref.checkpoint import files, layout
from fsdp_ref.errors import CheckpointError

from . import crashing, support
from .crashing import expected, loaded

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """A directory with a good checkpoint of step 1."""
    root = tmp_path_factory.mktemp("old") / "root"
    model, optimizer = crashing.small(1)
    checkpoint.save(root, step=1, model=model, optimizer=optimizer)
    return root


@pytest.mark.parametrize("power", (False, True), ids=("killed", "power-cut"))
def test_kill_at_every_operation(tmp_path, power):
    result = crashing.in_a_young_process(tmp_path, 1, 0, 0, 1, power)
    steps = [row["step"] for row in result["rows"]]
    assert all(row["said"] == ["killed"] for row in result["rows"])
    assert result["total"] == len(steps) > 25
    assert steps == sorted(steps) and set(steps) == {1, 2}                          # old before the commit, new from then on


@pytest.mark.parametrize("who", (0, 1))
def test_kill_one_of_two_ranks(tmp_path, who):
    """The other rank is told who died; what is on the disk is old or new."""
    result = crashing.in_a_young_process(tmp_path, 2, who, 6, None, False)
    assert len(result["rows"]) >= 5
    for row in result["rows"]:
        assert row["said"][who] == "killed"
        assert row["said"][1 - who].startswith((f"RankError: rank {who} died", "saved after")), row


def fail_everywhere(rank, size, root, who):
    """A save for each operation of rank `who`, which raises there; what this rank was told, and what the disk held after."""
    results = []
    model, optimizer = crashing.small(2, shard=True)
    at, step = 0, 2
    while True:
        at += 1

        def act(number=(errno.ENOSPC, errno.EIO)[at % 2]):
            raise OSError(number, os.strerror(number))

        layer = support.Tripwire(at, act) if rank == who else files.Files()
        with files.use(layer), warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            try:
                checkpoint.save(root, step=step, model=model, optimizer=optimizer)
                told = ""
            except CheckpointError as error:
                told = str(error)
        from fsdp_ref import collectives
        over = collectives.gather_json(at > len(getattr(layer, "log", [])))[who]
        results.append((told, support.names(root), step))
        if over:
            return results
        step += not told


@pytest.mark.parametrize("who", (0, 1))
def test_an_operation_that_fails_on_one_rank(ranks, old, tmp_path, who):
    """Every rank raises the same error naming the rank and the cause; nothing is left over; from the commit on it is a warning."""
    root = tmp_path / "root"
    shutil.copytree(old, root)
    told = ranks(2, fail_everywhere, root, who)
    assert told[0][0][0] and [row[0] for row in told[0]] == [row[0] for row in told[1]]
    failures = [row for row in told[0] if row[0]]
    assert len(failures) > (20 if who == 0 else 8)
    for message, present, step in failures:
        assert message.startswith(f"rank {who} could not save step {step}: ")
        assert "No space left" in message or "Input/output error" in message
        assert [name for name in present if ".tmp-" in name] == [] and layout.step_name(step) not in present
    assert checkpoint.committed(root)[0].name == "step-00000001"
    for path in checkpoint.committed(root):
        checkpoint.verify(path)


def order_of_operations(rank, size, root):
    model, optimizer = crashing.small(2, shard=True)
    with files.use(support.Tripwire()) as layer:
        checkpoint.save(root, step=2, model=model, optimizer=optimizer, keep_last=1)
    return layer.log


def test_the_order_of_operations(ranks, old, tmp_path):
    """Data and names are flushed before the rename, the rename before the pointer, the pointer before anything is deleted."""
    root = tmp_path / "root"
    shutil.copytree(old, root)
    first, second = ranks(2, order_of_operations, root)
    kinds = [name for name, _ in first]
    commit = first.index(("rename", "step-00000002"))
    assert first[0][0] == "mkdir"
    assert kinds[:commit].count("fsync") == kinds[:commit].count("create") == 4
    assert kinds[commit - 1] == "fsync_dir" and first[commit - 1][1].startswith("step-00000002.tmp-")
    assert first[commit + 1] == ("fsync_dir", "root")
    pointer = first.index(("replace", "latest"))
    assert kinds[commit + 2: pointer] == ["create", "write", "fsync"]
    assert "unlink" not in kinds[:pointer] and kinds[pointer:].count("unlink") == 4
    assert {name for name, _ in second} == {"create", "write", "fsync"}


def test_an_existing_step_is_never_written_into(old, tmp_path):
    root = tmp_path / "root"
    shutil.copytree(old, root)
    before = support.contents(root / "step-00000001")
    model, optimizer = crashing.small(5)
    with pytest.raises(CheckpointError, match=r"step-00000001 exists already and is never written into; "):
        checkpoint.save(root, step=1, model=model, optimizer=optimizer)
    assert support.contents(root / "step-00000001") == before
    assert support.names(root) == ["latest", "step-00000001"]


@pytest.mark.parametrize("pointer", ("", "step-99999999\n", "../..\n", "\x00garbage", None))
def test_the_pointer_is_only_advice(old, tmp_path, pointer):
    root = tmp_path / "root"
    shutil.copytree(old, root)
    (root / "latest").unlink() if pointer is None else (root / "latest").write_text(pointer)
    assert checkpoint.latest(root) == root / "step-00000001"
    assert loaded(root) == (1, expected(1))


def test_a_damaged_newest_gives_way_to_the_one_before(old, tmp_path):
    root = tmp_path / "root"
    shutil.copytree(old, root)
    model, optimizer = crashing.small(2)
    path = checkpoint.save(root, step=2, model=model, optimizer=optimizer)
    victim = path / "optimizer-00000-of-00001.safetensors"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    with pytest.warns(UserWarning, match=r"passing over the damaged checkpoint step-00000002: .*optimizer-.*safetensors is damaged"):
        assert loaded(root) == (1, expected(1))
    with pytest.raises(CheckpointError, match="optimizer-00000-of-00001.safetensors is damaged"):
        loaded(path)
    shutil.rmtree(root / "step-00000001")
    with pytest.warns(UserWarning), pytest.raises(CheckpointError, match="none of the 1 checkpoints in .* is whole"):
        loaded(root)
    victim.unlink()
    with pytest.warns(UserWarning, match="is missing"):
        assert checkpoint.latest(root) is None
