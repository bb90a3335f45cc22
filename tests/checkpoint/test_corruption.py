"""Whatever is wrong with the files, it is refused by name, nothing outside is opened, and no bit in memory changes."""

import os
import shutil
import sys

import pytest
import torch

from fsdp_ref import checkpoint
from fsdp_ref.checkpoint import files
from fsdp_ref.errors import CheckpointError

from . import crashing, support
from .damage import MODEL, STEP, edit, refuse, swap

pytestmark = pytest.mark.slow


def test_the_good_one_loads(step_dir, target):
    checkpoint.verify(step_dir)
    model, optimizer = crashing.small(9)
    report = checkpoint.load(step_dir, model=model, optimizer=optimizer)
    assert support.everything(model, optimizer) == crashing.expected(2) and report.skipped == ("loader",)
    edit(step_dir, lambda value: None)                           # sealing it again changes nothing
    checkpoint.verify(step_dir)


def link_out(step_dir):
    outside = step_dir.parent / "outside"
    shutil.move(step_dir / MODEL.format(0), outside)
    (step_dir / MODEL.format(0)).symlink_to(outside)


def replace_by_directory(step_dir):
    (step_dir / "rank-00001.json").unlink()
    (step_dir / "rank-00001.json").mkdir()


DIRECTORY = {
    "missing shard": (lambda d: (d / MODEL.format(1)).unlink(), "model-00001-of-00002.safetensors is missing"),
    "missing random state": (lambda d: (d / "rank-00000.json").unlink(), "rank-00000.json is missing"),
    "missing manifest": (lambda d: (d / "manifest.json").unlink(), "has no manifest.json"),
    "empty manifest": (lambda d: (d / "manifest.json").write_bytes(b""), "manifest.json cannot be read"),
    "extra shard": (lambda d: shutil.copy(d / MODEL.format(0), d / "model-00002-of-00003.safetensors"), "00002-of-00003.* does not belong"),
    "stale shard": (lambda d: (d / "model-00000-of-00001.safetensors").touch(), "does not belong"),
    "swapped shards": (lambda d: swap(d, MODEL.format(0), MODEL.format(1)), "model-0000"),
    "swapped random states": (lambda d: swap(d, "rank-00000.json", "rank-00001.json"), "rank-0000"),
    "symbolic link": (link_out, "is a symbolic link"),
    "a directory as file": (replace_by_directory, "is not a plain file"),
    "another name": (None, "is called step-00000009 and holds step 2"),
}


@pytest.mark.parametrize("case", DIRECTORY)
def test_what_is_wrong_with_the_directory(step_dir, target, case):
    change, match = DIRECTORY[case]
    if change is None:
        step_dir = step_dir.rename(step_dir.parent / "step-00000009")
    else:
        change(step_dir)
    refuse(step_dir, target, match)
    with pytest.raises(CheckpointError, match=match):
        checkpoint.verify(step_dir)


def test_a_name_twice(step_dir, target):
    path = step_dir / "manifest.json"
    path.write_text(path.read_text().replace('"step": 2,', '"step": 2, "step": 2,', 1))
    refuse(step_dir, target, "'step' stands there twice")


def test_a_deep_manifest(step_dir, target):
    (step_dir / "manifest.json").write_text('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}")
    refuse(step_dir, target, "manifest.json cannot be read")


def test_a_large_manifest_is_not_read(step_dir, target):
    with open(step_dir / "manifest.json", "ab") as file:
        file.truncate(2**40)                                     # a sparse file of a tebibyte
    _, watched = refuse(step_dir, target, "at most .* make sense there")
    assert watched.read == 0


def test_a_huge_header_is_not_read(step_dir, target):
    """Even with the right digest in the manifest."""
    path = step_dir / MODEL.format(0)
    data = (2**63).to_bytes(8, "little") + path.read_bytes()[8:]
    path.write_bytes(data)
    edit(step_dir, lambda v: v["files"][path.name].update(digest=files.digest_bytes(data)))
    _, watched = refuse(step_dir, target, "its header claims 9223372036854775808 bytes")
    assert watched.read < 200_000


def load_damaged(rank, size, step_dir):
    model, optimizer = crashing.small(7, shard=True)
    before = support.everything(model, optimizer)
    try:
        checkpoint.load(step_dir, model=model, optimizer=optimizer)
    except CheckpointError as error:
        return str(error), support.everything(model, optimizer) == before
    return "", False


def test_every_rank_raises_the_same(ranks, step_dir):
    data = bytearray((step_dir / "rank-00001.json").read_bytes())
    data[100] ^= 4
    (step_dir / "rank-00001.json").write_bytes(data)
    told = ranks(3, load_damaged, step_dir)
    assert told[0] == told[1] == told[2]
    assert "rank-00001.json is damaged" in told[0][0] and told[0][1]


def test_describe(step_dir):
    text = checkpoint.describe(step_dir)
    assert text.startswith(f"{STEP}: step 2, written by 2 ranks, 6 files, ")
    for part in ("weight  F32  [5, 3]  in 2 pieces", "AdamW, 6 tensors", '"lr": 0.1', 'loader: {"epoch": 1}', 'extra: {"note": 1}',
                 "scheduler: not saved", "random state: of 2 ranks", MODEL.format(1)):
        assert part in text
    with pytest.raises(CheckpointError, match="has no manifest.json"):
        checkpoint.describe(step_dir.parent)


def test_a_file_that_changes_between_check_and_reading(step_dir, target, monkeypatch):
    """The one moment at which memory may be half filled: the message says so."""
    module = sys.modules["fsdp_ref.checkpoint.load"]
    kept = module.examine

    def examine(*args):
        manifest = kept(*args)
        os.truncate(step_dir / MODEL.format(1), 100)
        return manifest
    monkeypatch.setattr(module, "examine", examine)
    model, optimizer = crashing.small(7)
    with pytest.raises(CheckpointError, match="what is in memory is now a mixture, load again before you train on"):
        checkpoint.load(step_dir, model=model, optimizer=optimizer)
    assert torch.isfinite(model.weight).all()
