"""Harness: the save runs once undisturbed; then once for every operation of every rank, which is killed there; and after each kill once
more, because a run that died is started again on the same disk. Rank 0 looks at the disk after each."""

import os
import shutil
from pathlib import Path

import torch

from .disk import Disk, call, contents, file_of, vote


def run(function, case, rank):
    """The evidence: log and end of the undisturbed save, what is on the disk after it, and what each kill left."""
    root = Path(rank.home, "disk")
    full, disk = one(function, case, rank, root)
    operations = [row["what"] for row in disk.log if row["what"] != "barrier"]
    held = sum(tensor.numel() * tensor.element_size() for tensor in case["shards"].values())
    own = sum(row["payload"] for row in disk.log) <= held                # else the ranks talk to each other, and a dead one would not answer
    counts = everyone(rank.wire, len(operations) if full["how"] == "returned" and own else -1)
    trials = []
    for victim, number in enumerate(counts if min(counts) >= 0 else []):
        for at in range(number):
            mine = operations[at] if rank.rank == victim else ""
            writes = vote(rank.wire, int(mine == "write"), 0)[0]
            for half in (False, True) if writes else (False,):
                left = trial(function, case, rank, root, victim, at, half)
                trials.append({"victim": victim, "at": at, "half": half, "what": mine, **left})
    return {"log": disk.log, "end": full, "trials": trials}


def everyone(wire, number):
    """This number of every rank."""
    numbers = torch.zeros(wire.world, dtype=torch.int64)
    wire.all_gather_into_tensor(numbers, torch.tensor([number]))
    return numbers.tolist()


def one(function, case, rank, root, kill_at=None, half=False, anew=True):
    """One save on a disk that holds an older checkpoint (`anew`), or on the disk as the last save left it."""
    if rank.rank == 0 and anew:
        shutil.rmtree(root, ignore_errors=True)
        older = root / f"step-{case['old']:08d}"
        os.makedirs(older)
        for each, tensors in enumerate(case["older"]):
            (older / f"rank-{each}.safetensors").write_bytes(file_of(tensors))
    rank.wire.barrier()
    disk = Disk(root, rank.wire, kill_at, half)
    ended = call(function, disk, case["new"], {name: each.clone() for name, each in case["shards"].items()}, rank.rank, rank.world)
    ended["found"] = contents(root) if rank.rank == 0 else {}
    rank.wire.barrier()
    return ended, disk


def trial(function, case, rank, root, victim, at, half):
    """A kill of `victim` at its operation number `at`, and what a second try makes of the disk."""
    ended, _ = one(function, case, rank, root, at if rank.rank == victim else None, half)
    there = vote(rank.wire, int(f"step-{case['new']:08d}" in ended["found"]), 0)[0]
    again = {"how": "returned", "error": "", "found": ended["found"]} if there else one(function, case, rank, root, anew=False)[0]
    return {"how": ended["how"], "found": ended["found"], "again": again["how"], "error": again["error"], "after": again["found"]}
