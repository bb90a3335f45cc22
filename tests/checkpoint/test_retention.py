"""What is kept, what goes, and what is never touched."""

import mmap
import os
import random
import shutil
import threading
import warnings

import numpy as np
import pytest
import safetensors

from fsdp_ref import checkpoint
from fsdp_ref.checkpoint import files, layout, retention
from fsdp_ref.errors import CheckpointError

from . import crashing, support


def save(root, step, **options):
    model, optimizer = crashing.small(step % 100)
    return checkpoint.save(root, step=step, model=model, optimizer=optimizer, **options)


def steps(root):
    return [layout.step_of(path.name) for path in checkpoint.committed(root)]


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch):
    monkeypatch.setattr(retention, "_protected", None)


def test_b30_the_order_is_that_of_numbers(tmp_path):
    for step in (9, 10, 100):
        save(tmp_path, step, keep_last=2)
    assert steps(tmp_path) == [10, 100]
    save(tmp_path, 10**9, keep_last=2)                           # more digits than the name is padded to
    assert steps(tmp_path) == [100, 10**9] and checkpoint.latest(tmp_path).name == "step-1000000000"
    assert (tmp_path / "latest").read_text() == "step-1000000000\n"


def test_without_keep_last_nothing_goes(tmp_path):
    for step in range(4):
        save(tmp_path, step)
    assert steps(tmp_path) == [0, 1, 2, 3]


def test_b30_failed_saves_do_not_count(tmp_path):
    save(tmp_path, 1, keep_last=1)

    def act():
        raise OSError(28, "No space left on device")
    for step in (2, 3, 4):
        with files.use(support.Tripwire(5, act)), pytest.raises(CheckpointError, match="No space left"):
            save(tmp_path, step, keep_last=1)
        os.mkdir(tmp_path / layout.step_name(step + 10))         # a directory without a manifest is no checkpoint
    assert steps(tmp_path) == [1]
    checkpoint.verify(tmp_path / "step-00000001")


def test_b30_the_one_loaded_from_stays(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    model, _ = crashing.small(0)
    checkpoint.load(tmp_path, model=model, step=1)
    save(tmp_path, 4, keep_last=1)
    assert steps(tmp_path) == [1, 4]


def test_b30_later_steps_of_an_earlier_run(tmp_path):
    """They do not push the new ones out, and are told of."""
    for step in (900, 1000):
        save(tmp_path, step)
    for step in (10, 20, 30):
        with pytest.warns(UserWarning, match="later checkpoints than the one just written .step-00000900, step-00001000."):
            save(tmp_path, step, keep_last=2)
    assert steps(tmp_path) == [20, 30, 900, 1000]


@pytest.mark.parametrize("call", ("save", "async_save"))
def test_b30_nothing_goes_before_the_new_one_is_there(tmp_path, call):
    """At every moment of a save with keep_last=1 there is a committed checkpoint; the old one goes last."""
    save(tmp_path, 1)
    held = []

    class Look(support.Tripwire):
        def _step(self, name, path=""):
            held.append(steps(tmp_path))

    model, optimizer = crashing.small(2)
    with files.use(Look()):
        saved = getattr(checkpoint, call)(tmp_path, step=2, model=model, optimizer=optimizer, keep_last=1)
        call == "save" or saved.wait()
    kinds = [list(key) for key in dict.fromkeys(map(tuple, held))]
    assert kinds == [[1], [1, 2], [2]] and steps(tmp_path) == [2]


def test_b30_retention_spares_what_another_thread_is_loading(tmp_path):
    """A load waits for the save that runs in the background, whose retention could delete what is read."""
    save(tmp_path, 1)
    model, _ = crashing.small(2)
    gate, order = support.Gate(), []
    with files.use(gate):
        handle = checkpoint.async_save(tmp_path, step=2, model=model, keep_last=1)
        gate.reached.wait(10)
        opener = threading.Timer(0.2, lambda: (order.append("opened"), gate.release.set()))
        opener.start()
        report = checkpoint.load(tmp_path, model=crashing.small(0)[0])
        order.append("loaded")
        opener.join()
    assert handle.wait().name == "step-00000002" and report.step == 2 and order == ["opened", "loaded"]


def test_b30_foreign_names_are_never_touched(tmp_path):
    foreign = ["old-step-00000005", "step-00000005.bak", "step-5", "step-0000000005", "step-00000005.tmp", "step-00000005.tmp-abc",
               "step-00000005.tmp-" + "G" * 32, "xstep-00000005.tmp-" + "a" * 32, "Step-00000005", "step-00000005\n", "notes"]
    outside = tmp_path / "outside"
    root = tmp_path / "root"
    for directory in (outside, *(root / name for name in foreign)):
        directory.mkdir(parents=True)
        (directory / "manifest.json").write_text("{}")
    (root / "step-00000006").symlink_to(outside)
    (root / ("step-00000007.tmp-" + "b" * 32)).symlink_to(outside)
    (root / ("step-00000008.tmp-" + "c" * 32)).mkdir()
    (root / ("step-00000008.tmp-" + "c" * 32) / "model-00000-of-00001.safetensors").touch()
    (root / ("step-00000008.tmp-" + "d" * 32)).write_text("step-00000008\n")
    for step in (10, 11, 12):
        save(root, step, keep_last=1)
    assert support.names(root) == sorted([*foreign, "step-00000006", "step-00000012", "latest"])
    assert support.names(outside) == ["manifest.json"]


def test_names_and_numbers():
    for step in (0, 7, 99_999_999, 100_000_000, 10**17):
        assert layout.step_of(layout.step_name(step)) == step
    for name in ("step-1", "step-000000001", "step-0000000a", "step-٠٠٠٠٠٠٠١", "step--0000001", "step-00000001/", ""):
        assert layout.step_of(name) is None


def test_b30_a_half_deleted_checkpoint_is_none(tmp_path):
    """Deletion fails after its first file: the old one has no committed name any more, and the next save sweeps it."""
    save(tmp_path, 1)
    layer = support.Tripwire(2, lambda: (_ for _ in ()).throw(OSError(5, "Input/output error")), only="unlink")
    with files.use(layer), pytest.warns(UserWarning, match="could not delete the old checkpoint .*step-00000001"):
        save(tmp_path, 2, keep_last=1)
    assert steps(tmp_path) == [2]
    save(tmp_path, 3)
    assert support.names(tmp_path) == ["latest", "step-00000002", "step-00000003"]


@pytest.mark.parametrize("value", (0, -1, 1.5, True, "2"))
def test_a_senseless_keep_last(tmp_path, value):
    with pytest.raises(CheckpointError, match="keep_last is .*; give 1 or more"):
        save(tmp_path, 1, keep_last=value)


def test_nothing_there(tmp_path):
    assert checkpoint.latest(tmp_path / "missing") is None and checkpoint.committed(tmp_path / "missing") == []
    (tmp_path / "file").touch()
    assert checkpoint.latest(tmp_path / "file") is None
    model, _ = crashing.small(0)
    for place in (tmp_path, tmp_path / "missing", tmp_path / "file", tmp_path / "step-00000001"):
        with pytest.raises(CheckpointError, match="there is no checkpoint"):
            checkpoint.load(place, model=model)
    save(tmp_path, 3)
    with pytest.raises(CheckpointError, match="there is no checkpoint of step 4 in .*; it has step-00000003"):
        checkpoint.load(tmp_path, model=model, step=4)
    with pytest.raises(CheckpointError, match="is not step 4"):
        checkpoint.load(tmp_path / "step-00000003", model=model, step=4)
    with pytest.raises(CheckpointError, match="File exists .*file"):
        save(tmp_path / "file", 1)


def test_b30_random_orders_keep_the_newest(tmp_path):
    """Whatever is written in whatever order, the one just written is there and k of its past at most."""
    dice = random.Random(3)
    for step in dice.sample(range(1000), 12):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path = save(tmp_path, step, keep_last=3)
        assert path in checkpoint.committed(tmp_path)
        assert len([other for other in steps(tmp_path) if other <= step]) <= 3


def test_b34_mapped_tensors_outlive_their_checkpoint(tmp_path):
    """Tensors mapped from a checkpoint keep their values while the step is deleted, saved anew and pruned: no file is ever reused."""
    path = save(tmp_path, 1)
    shard = path / "model-00000-of-00001.safetensors"
    with safetensors.safe_open(shard, framework="pt") as opened, open(shard, "rb") as plain:
        lazily = {name: opened.get_tensor(name) for name in opened.keys()}
        mapped = np.frombuffer(mmap.mmap(plain.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        before, bytes_before, inode = {name: support.bits(t) for name, t in lazily.items()}, mapped.tobytes(), os.stat(shard).st_ino
        kept = os.open(shard, os.O_RDONLY)                   # so that the new file cannot get the old one's number
        shutil.rmtree(path)
        model, optimizer = crashing.small(50)
        checkpoint.save(tmp_path, step=1, model=model, optimizer=optimizer)
        assert os.stat(shard).st_ino != inode and shard.read_bytes() != bytes_before
        save(tmp_path, 2, keep_last=1)
        assert not shard.exists()
        assert {name: support.bits(t) for name, t in lazily.items()} == before and mapped.tobytes() == bytes_before
        os.close(kept)
