"""More than ten thousand random corruptions: every one is refused by name, without a bit changed, a file opened elsewhere, or memory."""

import os
import random
import shutil

import pytest

from fsdp_ref import checkpoint, collectives
from fsdp_ref.errors import CheckpointError

from . import corrupting, crashing, support
from .damage import STEP
from .memory import Growth
from .opening import OpenHook, outside
from .support import Schedule

pytestmark = pytest.mark.slow

# How many of each kind; the kinds that can be counted out are all there, beside these.
DRAWN = {"flip": 3300, "overwrite": 1000, "truncate": 1000, "append": 300, "zero_page": 400, "swap_stretches": 300, "extra": 250,
         "forge_manifest": 1300, "forge_header": 1200, "forge_names": 400, "forge_sizes": 200, "forge_random_state": 50}


def save_variant(rank, size, root, step):
    model, optimizer = crashing.small(step, shard=True)
    checkpoint.save(root, step=step, model=model, optimizer=optimizer, loader=Schedule(epoch=1), extra={"note": 1})


class Victim:
    """A good checkpoint, and what is there to be filled from it."""

    def __init__(self, step_dir, seed=7, shard=False):
        self.step_dir, self.good = step_dir, support.contents(step_dir)
        self.model, self.optimizer = crashing.small(seed, shard)
        self.loader = Schedule(epoch=0)
        self.before = self.state()

    def state(self):
        return support.everything(self.model, self.optimizer), dict(self.loader.state), support.random_states()

    def load(self):
        checkpoint.load(self.step_dir, model=self.model, optimizer=self.optimizer, loader=self.loader)

    def damage(self, overlay):
        """Put a corruption in place. It must be one: not a file may be as it was."""
        for name, data in overlay.items():
            assert data != self.good.get(name), f"{name} is not changed at all"
            path = self.step_dir / name
            path.unlink(missing_ok=True)                         # a new file is made faster than an old one is written anew
            if data is not None:
                path.write_bytes(data)

    def mend(self, overlay):
        for name in overlay:
            (self.step_dir / name).unlink(missing_ok=True)
            if name in self.good:
                (self.step_dir / name).write_bytes(self.good[name])


def refused(victim, kind, overlay):
    """Loading raises, the message names a file or the directory, and nothing has changed."""
    victim.damage(overlay)
    try:
        victim.load()
    except CheckpointError as error:
        assert str(victim.step_dir) in str(error) and len(str(error)) < 3000, (kind, str(error))
    else:
        pytest.fail(f"{kind} was accepted: {overlay}")
    assert victim.state() == victim.before, kind
    victim.mend(overlay)


@pytest.mark.timeout(1200)                                       # three quarters of a minute on a quiet machine
def test_ten_thousand_corruptions_are_refused(ranks, tmp_path):
    ranks(2, save_variant, tmp_path, 2)
    ranks(2, save_variant, tmp_path / "later", 3)
    for size in (1, 3):
        ranks(size, save_variant, tmp_path / f"by{size}", 2)
    victim, dice = Victim(tmp_path / STEP), random.Random(20)
    later = support.contents(tmp_path / "later" / "step-00000003")
    others = [support.contents(tmp_path / f"by{size}" / STEP) for size in (1, 3)]
    good, counts = victim.good, {}
    (tmp_path / "x").write_bytes(b"outside")                     # a bait for ../x

    def corruptions():
        for kind, count in DRAWN.items():
            for _ in range(count):
                yield kind, getattr(corrupting, kind)(dice, good)
        for kind, made in (("missing", corrupting.all_missing(good)), ("swapped", corrupting.all_swapped(good)),
                           ("stale", corrupting.all_stale(good, later)),
                           ("another_world", (corrupting.another_world(dice, good, others) for _ in range(200)))):
            yield from ((kind, overlay) for overlay in made)

    with Growth() as growth, OpenHook() as opened:
        for kind, overlay in corruptions():
            refused(victim, kind, overlay)
            counts[kind] = counts.get(kind, 0) + 1
            assert outside(victim.step_dir, opened) == [], kind
            opened.clear()
    assert growth.bytes < 50 << 20
    assert {kind: counts[kind] for kind in DRAWN} == DRAWN
    assert (counts["missing"], counts["swapped"], counts["stale"]) == (127, 36, 190)
    assert sum(counts.values()) >= 10_000, counts
    checkpoint.verify(victim.step_dir)
    assert checkpoint.load(victim.step_dir, model=victim.model, optimizer=victim.optimizer, loader=victim.loader).step == 2
    assert victim.state() != victim.before


def test_what_stands_in_the_place_of_a_file(good, tmp_path):
    """A link (also to the very same bytes), a directory, a pipe, a socket: never followed, never waited for."""
    import socket
    shutil.copytree(good, tmp_path / STEP)
    shutil.copytree(good, tmp_path / "copy")
    victim = Victim(tmp_path / STEP)
    for name in victim.good:
        path = victim.step_dir / name
        for kind in ("link", "dangling", "loop", "directory", "pipe", "socket", "device"):
            path.unlink()
            if kind in ("link", "dangling", "loop", "device"):
                path.symlink_to({"link": tmp_path / "copy" / name, "dangling": tmp_path / "nowhere", "loop": path,
                                 "device": "/dev/zero"}[kind])
            elif kind == "directory":
                path.mkdir()
            elif kind == "pipe":
                os.mkfifo(path)
            else:
                with socket.socket(socket.AF_UNIX) as end:
                    here = os.getcwd()
                    os.chdir(path.parent)                        # the name of a socket must be short
                    try:
                        end.bind(name)
                    finally:
                        os.chdir(here)
            with pytest.raises(CheckpointError, match="|".join((name, "has no manifest"))):
                victim.load()
            assert victim.state() == victim.before
            path.rmdir() if kind == "directory" else path.unlink()
            path.write_bytes(victim.good[name])
    victim.load()


def refuse_together(rank, size, root, seed, count):
    """Rank 0 damages the checkpoint, every rank loads it; returns this rank's messages."""
    victim, dice = Victim(root / STEP, shard=True), random.Random(seed)
    told = []
    for number in range(count):
        kind = list(DRAWN)[number % len(DRAWN)]
        overlay = getattr(corrupting, kind)(dice, victim.good)       # the same on every rank
        if rank == 0:
            victim.damage(overlay)
        collectives.barrier()
        try:
            victim.load()
            told.append(f"{kind} was accepted")
        except CheckpointError as error:
            told.append(str(error))
        assert victim.state() == victim.before, kind
        collectives.barrier()
        if rank == 0:
            victim.mend(overlay)
    return told


@pytest.mark.parametrize("size", (2, 3))
def test_every_rank_refuses_with_the_same_words(ranks, good, tmp_path, size):
    shutil.copytree(good, tmp_path / STEP)
    told = ranks(size, refuse_together, tmp_path, size, 180)
    assert all(theirs == told[0] for theirs in told)
    assert len(told[0]) == 180 and all(str(tmp_path / STEP) in message for message in told[0])
