"""A good checkpoint of two ranks to damage, and the check that a damaged one is refused."""

import json
import os
import shutil

import pytest

from fsdp_ref import checkpoint
from fsdp_ref.checkpoint import files
from fsdp_ref.checkpoint.manifest import seal
from fsdp_ref.errors import CheckpointError

from . import crashing, support

STEP = "step-00000002"
MODEL = "model-0000{}-of-00002.safetensors"
OPTIMIZER = "optimizer-0000{}-of-00002.safetensors"


def write_good(rank, size, root):
    model, optimizer = crashing.small(2, shard=True)
    checkpoint.save(root, step=2, model=model, optimizer=optimizer, loader=support.Schedule(epoch=1), extra={"note": 1})


class Watched(files.Files):
    """Notes every path that is opened and how much is read."""

    def __init__(self):
        self.opened, self.read = [], 0

    def open(self, path):
        self.opened.append(str(path))
        return super().open(path)

    def read_into(self, descriptor, buffer, offset):
        self.read += len(buffer)
        return super().read_into(descriptor, buffer, offset)


def refuse(step_dir, target, match="."):
    """Loading and verifying both raise; the target is as it was; no file outside was opened."""
    model, optimizer = target
    before, loader = support.everything(model, optimizer), support.Schedule(epoch=0)
    states = support.random_states()
    with files.use(Watched()) as watched:
        with pytest.raises(CheckpointError, match=match) as caught:
            checkpoint.load(step_dir, model=model, optimizer=optimizer, loader=loader)
    assert support.everything(model, optimizer) == before and loader.state == {"epoch": 0}
    assert support.random_states() == states
    assert all(os.path.dirname(path) == str(step_dir) for path in watched.opened)
    return str(caught.value), watched


def edit(step_dir, change):
    """Change the manifest as someone would who knows how its digest is made."""
    path = step_dir / "manifest.json"
    value = json.loads(path.read_text())
    value.pop("digest")
    change(value)
    path.write_bytes(seal(value))


def swap(step_dir, first, second):
    shutil.move(step_dir / first, step_dir / "x")
    shutil.move(step_dir / second, step_dir / first)
    shutil.move(step_dir / "x", step_dir / second)
