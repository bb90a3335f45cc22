"""A save that dies or fails at any operation leaves the old checkpoints whole, and the next save works."""

import shutil
import threading
import time
import warnings

import pytest

from fsdp_ref import checkpoint, collectives
from fsdp_ref.checkpoint import background, files
from fsdp_ref.errors import CheckpointError

from . import crashing, faults, support
from .crashing import expected, loaded

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """A directory with a good checkpoint of step 1."""
    root = tmp_path_factory.mktemp("old") / "root"
    model, optimizer = crashing.small(1)
    checkpoint.save(root, step=1, model=model, optimizer=optimizer)
    return root


def check_all_operations(logs):
    """Rank 0 does everything there is, the other ranks write their files."""
    assert {name for name, _ in logs[0]} == faults.OPERATIONS
    for log in logs[1:]:
        assert {name for name, _ in log} == {"create", "write", "fsync", "close"}


@pytest.mark.parametrize("call", crashing.CALLS)
def test_b24_b25_death_and_power_loss_at_every_operation(tmp_path, call):
    """After each: the old checkpoint or the new one, whole, the leftovers swept by the next save. Old before the commit, new after."""
    result = crashing.in_a_young_process(tmp_path, crashing.matrix, 1, call)
    log, rows = result["logs"][0], result["rows"]
    check_all_operations([log])
    writes = [name for name, _ in log].count("write")
    assert len(rows) == len(log) * (1 + len(faults.CUTS)) + writes > 120              # every operation, every kind, none left out
    assert [row for row in rows if row["said"] != ["killed"]] == []
    commit = 1 + next(at for at, (name, _) in enumerate(log) if name == "rename")
    for row in rows:
        if row["kind"] in ("kill", "torn", "data lost"):
            assert row["step"] == (1 if row["at"] <= commit else 2), row
        elif row["kind"] == "names lost":                                              # the rename counts once the parent is flushed
            assert row["step"] == (1 if row["at"] <= commit + 1 else 2), row
        elif row["at"] <= commit or row["at"] > commit + 1:
            assert row["step"] == (1 if row["at"] <= commit else 2), row


@pytest.mark.parametrize("call", crashing.CALLS)
def test_b24_death_of_one_of_two_ranks_at_every_operation(tmp_path, call):
    """The other rank is told who died; what is on the disk is old or new."""
    result = crashing.in_a_young_process(tmp_path, crashing.matrix, 2, call)
    logs, rows = result["logs"], result["rows"]
    check_all_operations(logs)
    assert len(rows) == sum(len(log) + [name for name, _ in log].count("write") for log in logs) > 50
    pointer = 1 + next(at for at, (name, _) in enumerate(logs[0]) if name == "fsync_dir" and logs[0][at - 1][0] == "replace")
    for row in rows:
        survivor = row["said"][1 - row["who"]]
        assert row["said"][row["who"]] == "killed"
        assert survivor.startswith(f"RankError: rank {row['who']} died") != (row["who"] == 0 and row["at"] > pointer), row
        assert row["seconds"] < 20                                                     # the time limit of a collective, never reached
    told = [row["said"][1 - row["who"]] for row in rows]
    print(f"{call}: {len(rows)} deaths, {sum('died' in said for said in told)} told to the survivor")


def test_b25_a_new_root_survives_the_loss_of_power(tmp_path):
    """The names of the directories above the checkpoint are flushed as well."""
    result = crashing.in_a_young_process(tmp_path, crashing.new_root)
    assert result["said"] == ["killed"] and result["step"] == 2
    assert [name for name, _ in result["log"]][:4] == ["mkdir", "fsync_dir", "mkdir", "fsync_dir"]


# -- errors -------------------------------------------------------------------------------------------------------------------


def fail_everywhere(rank, size, root, old, call, who):
    """Every error at every operation of rank `who`: what this rank was told, how long it took, and what the disk held after."""
    warnings.simplefilter("ignore")

    def renew():
        if rank == 0:
            crashing.renew(root, old)
        collectives.barrier()

    def attempt(layer):
        began = time.monotonic()
        try:
            with files.use(layer):
                crashing.write(call, root, 2)
            told = ""
        except CheckpointError as error:
            told = str(error)
        return told, time.monotonic() - began

    renew()
    attempt(layer := faults.Faults())
    log = collectives.gather_json(layer.log)[who]
    results = []
    for at, kind in faults.cases(log, faults.ERRORS):
        renew()
        told, seconds = attempt(faults.Faults(at, kind) if rank == who else faults.Faults())
        collectives.barrier()
        present, found = support.names(root), crashing.loaded(root, crashing.tiny)
        assert found == (found[0], crashing.expected(found[0], crashing.tiny))
        again, _ = attempt(faults.Faults()) if found[0] == 1 else ("", 0)
        last = crashing.loaded(root, crashing.tiny)[0]
        results.append({"at": at, "kind": kind, "told": told, "seconds": seconds, "present": present, "found": found[0],
                        "again": again, "last": last})
    return log, results


@pytest.mark.parametrize("who", (0, 1))
@pytest.mark.parametrize("call", crashing.CALLS)
def test_b27_every_error_at_every_operation_of_one_rank(ranks, tmp_path, call, who):
    """Every rank raises the same error naming the rank and the cause, nothing is left over, the next save of the same step works.

    From the commit on it is a warning: the checkpoint is there.
    """
    with files.use(faults.Faults()):
        crashing.write("save", tmp_path / "old", 1)
    told = ranks(2, fail_everywhere, tmp_path / "root", tmp_path / "old", call, who, limit=200)
    log, rows = told[0]
    if who == 0:
        check_all_operations([log])
    assert len(rows) == 2 * len(log) + [name for name, _ in log].count("write") > 30
    assert [row["told"] for row in rows] == [row["told"] for row in told[1][1]]
    committed = next((at for at, (name, _) in enumerate(log) if name == "rename"), len(log)) + 2     # the parent's flush may still fail
    for row in rows:
        assert (row["told"] != "") == (row["at"] <= committed), row
        assert row["found"] == (1 if row["told"] else 2) and row["last"] == 2 and row["again"] == "", row
        if row["told"]:
            assert row["told"].startswith(f"rank {who} could not save step 2: ")
            assert ("Input/output error" if row["kind"] == "EIO" else "No space left") in row["told"]
            assert row["present"] == ["latest", "step-00000001"], row
        assert row["seconds"] < 10


def order_of_operations(rank, size, root):
    model, optimizer = crashing.small(2, shard=True)
    with files.use(support.Tripwire()) as layer:
        checkpoint.save(root, step=2, model=model, optimizer=optimizer, keep_last=1)
    return layer.log


def test_b25_the_order_of_operations(ranks, old, tmp_path):
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


def late_rank(rank, size, root, call):
    """Rank 2 flushes late: when its last file was flushed there, and when rank 0 first saw a new name beside the old ones."""
    flushed = []

    class Late(files.Files):
        def fsync(self, descriptor):
            time.sleep(0.3)
            super().fsync(descriptor)
            flushed.append(time.perf_counter())

    model, optimizer = crashing.small(2, shard=True)
    with files.use(Late() if rank == 2 else files.Files()):
        if rank:
            saved = getattr(checkpoint, call)(root, step=2, model=model, optimizer=optimizer)
            call == "save" or saved.wait()
            return flushed[-1] if flushed else None
        thread = threading.Thread(target=lambda: getattr(checkpoint, call)(root, step=2, model=model, optimizer=optimizer))
        thread.start()
        while (root / "latest").read_text() == "step-00000001\n" and not (root / "step-00000002").exists():
            time.sleep(0.005)
        seen = time.perf_counter()
        thread.join()
        background.finish()
        return seen


@pytest.mark.parametrize("call", crashing.CALLS)
def test_b25_nothing_is_published_before_the_last_rank_is_through(ranks, old, tmp_path, call):
    root = tmp_path / "root"
    shutil.copytree(old, root)
    seen, _, flushed = ranks(3, late_rank, root, call)
    assert seen > flushed
    assert (root / "latest").read_text() == "step-00000002\n"


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
def test_b25_the_pointer_is_only_advice(old, tmp_path, pointer):
    root = tmp_path / "root"
    shutil.copytree(old, root)
    (root / "latest").unlink() if pointer is None else (root / "latest").write_text(pointer)
    assert checkpoint.latest(root) == root / "step-00000001"
    assert loaded(root) == (1, expected(1))


def test_b24_a_damaged_newest_gives_way_to_the_one_before(old, tmp_path):
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
