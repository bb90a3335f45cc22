"""The exercise `sharded_save`: every rank writes its slice, and the checkpoint appears under its name all at once or not at all.

The save runs once undisturbed; then once for every operation of every rank, which is killed there; and after each kill once more, because a
run that died is started again on the same disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from .disk import Disk, call, contents, digest, shared_folder
from .finding import Finding

PROPERTIES = ("values", "sharding", "atomic", "order", "no hang")
OLD, NEW = 3, 7                              # the step that is saved already, and the one to save


def cases(seed: int) -> list[dict]:
    """Two worlds; ranks hold different shapes, the last one nothing of `bias`."""
    return [{"world": 2, "seed": 61}, {"world": 3, "seed": seed}]


def shards_of(case: dict, rank: int, step: int) -> dict[str, torch.Tensor]:
    """What one rank holds at a step."""
    random = torch.Generator().manual_seed(case["seed"] + 10 * step + rank)
    return {"weight": torch.randn(3, 4, generator=random) + rank, "bias": torch.randn(2 if rank < case["world"] - 1 else 0, generator=random)}


def name_of(step: int) -> str:
    """The folder of a step."""
    return f"step-{step:08d}"


def run(student, case: dict, rank: int, world: int) -> dict:
    """All the saves of this rank; rank 0 looks at the disk after each."""
    root = shared_folder()
    try:
        full, disk = _save(student, case, rank, root)
        log, trials = disk.log, []
        operations = [row["what"] for row in log if row["what"] != "barrier"]
        own = all(row["path"].rpartition("/")[2] == f"rank-{rank}.safetensors" for row in log if row["what"] == "write")
        counts = _everyone(len(operations) if full["how"] == "returned" and own else -1, world)
        for victim, number in enumerate(counts if min(counts) >= 0 else []):
            for at in range(number):
                half = _told(operations[at] == "write" if rank == victim else False)
                for halved in (False, True) if half else (False,):
                    what = operations[at] if rank == victim else ""
                    trials.append({"victim": victim, "at": at, "half": halved, "what": what, **_trial(student, case, rank, root, victim, at, halved)})
        return {"log": log, "end": full, "found": full.pop("found"), "trials": trials}
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(root, ignore_errors=True)


def _everyone(number: int, world: int) -> list[int]:
    numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(numbers, torch.tensor([number]))
    return [int(each) for each in numbers]


def _told(yes: bool) -> bool:
    flag = torch.tensor([int(yes)])
    dist.all_reduce(flag)
    return bool(flag)


def _save(student, case: dict, rank: int, root: Path, kill_at: int | None = None, half: bool = False, anew: bool = True) -> tuple[dict, Disk]:
    """One save on a disk that holds an older checkpoint (`anew`), or on the disk as the last save left it."""
    if rank == 0 and anew:
        shutil.rmtree(root)
        (root / name_of(OLD)).mkdir(parents=True)
        for each in range(case["world"]):
            save_file(shards_of(case, each, OLD), root / name_of(OLD) / f"rank-{each}.safetensors")
    dist.barrier()
    disk = Disk(root, kill_at, half)
    ended = call(student, disk, NEW, shards_of(case, rank, NEW), rank, case["world"])
    ended["found"] = contents(root) if rank == 0 else {}
    dist.barrier()
    return ended, disk


def _trial(student, case: dict, rank: int, root: Path, victim: int, at: int, half: bool) -> dict:
    """A kill of `victim` at its operation number `at`, and what a second try makes of the disk."""
    ended, _ = _save(student, case, rank, root, at if rank == victim else None, half)
    published = _told(name_of(NEW) in ended["found"])
    again = {"how": "returned", "error": "", "found": ended["found"]} if published else _save(student, case, rank, root, anew=False)[0]
    return {"how": ended["how"], "found": ended["found"], "again": again["how"], "error": again["error"], "after": again["found"]}


def judge(case: dict, evidence: list[dict]) -> list[Finding]:
    """What is wrong, the cause before what follows from it."""
    return [finding for look in (_ended, _sharding, _files, _known, _kills) for finding in look(case, evidence)]


def expected(case: dict, step: int) -> dict[str, str]:
    """What the files of a checkpoint hold."""
    return {f"rank-{rank}.safetensors": digest(shards_of(case, rank, step)) for rank in range(case["world"])}


def _ended(case: dict, evidence: list[dict]) -> Iterator[Finding]:
    for rank, seen in enumerate(evidence):
        if seen["end"]["how"] == "stuck":
            yield Finding("no hang", f"this rank waits in its barrier number {seen['end']['barriers']}, and another rank has returned without "
                          "it: every rank must call the same barriers", rank)
        elif seen["end"]["how"] == "raised":
            yield Finding("values", f"the save raised {seen['end']['error']}", rank)


def _sharding(case: dict, evidence: list[dict]) -> Iterator[Finding]:
    for rank, seen in enumerate(evidence):
        written = sum(row["payload"] for row in seen["log"] if row["what"] == "write")
        own = sum(tensor.numel() * tensor.element_size() for tensor in shards_of(case, rank, NEW).values())
        if written > own:
            yield Finding("sharding", f"this rank writes {written} bytes and holds {own}: it writes what belongs to other ranks, and would need the "
                          "whole model in its memory", rank)
        elif written < own and evidence[rank]["end"]["how"] == "returned":
            yield Finding("sharding", f"this rank writes {written} of the {own} bytes it holds", rank)


def _files(case: dict, evidence: list[dict]) -> Iterator[Finding]:
    found, right = evidence[0]["found"].get(name_of(NEW)), expected(case, NEW)
    if any(seen["end"]["how"] != "returned" for seen in evidence):
        return
    if found is None:
        yield Finding("values", f"there is no folder {name_of(NEW)} after the save")
        return
    for file in right:
        if file not in found:
            yield Finding("values", f"{name_of(NEW)} has no {file}; it holds {', '.join(found) or 'nothing'}: ranks that write under one name "
                          "overwrite each other", parameter=file)
        elif found[file] != right[file]:
            yield Finding("values", f"{file} does not hold the tensors of its rank", parameter=file)


def _known(case: dict, evidence: list[dict]) -> Iterator[Finding]:
    """Order: what the rank that publishes knows of the others, and they of it."""
    renames = [(rank, place, row) for rank, seen in enumerate(evidence) for place, row in enumerate(seen["log"])
               if row["what"] == "rename" and row["to"] == name_of(NEW)]
    if len(renames) != 1:
        return
    publisher, at, rename = renames[0]
    for rank, seen in enumerate(evidence):
        before = lambda place, row: place < at if rank == publisher else row["barriers"] < rename["barriers"]  # noqa: B023, E731
        writes = [(place, row) for place, row in enumerate(seen["log"]) if row["what"] == "write"]
        for place, row in writes:
            file = row["path"].rpartition("/")[2]
            synced = any(other["what"] == "sync" and other["path"] == row["path"] and later > place and before(later, other)
                         for later, other in enumerate(seen["log"]))
            if not before(place, row):
                yield Finding("order", f"rank {publisher} publishes the checkpoint without knowing that rank {rank} has written {file}: no barrier "
                              "stands between the two", rank, file)
            elif not synced:
                yield Finding("order", f"{file} is not synced before the checkpoint is published: after a power cut it may be empty although its "
                              "name is there", rank, file)
        if rank != publisher and seen["end"]["how"] == "returned" and seen["end"]["barriers"] <= rename["barriers"]:
            yield Finding("order", f"the save returns on rank {rank} before it can know that rank {publisher} has published the checkpoint: a barrier "
                          "is missing after the rename", rank)


def _kills(case: dict, evidence: list[dict]) -> Iterator[Finding]:
    """Atomic: what a reader finds after every kill, and what a second try comes to."""
    for number, trial in enumerate(evidence[0]["trials"]):
        victim = trial["victim"]
        what = evidence[victim]["trials"][number]["what"]
        where = f"rank {victim} was killed {'in the middle of' if trial['half'] else 'before'} its operation {trial['at'] + 1} ({what})"
        for step in (OLD, NEW):
            found, right = trial["found"].get(name_of(step)), expected(case, step)
            if found is not None and found != right:
                whole = sum(found.get(file) == right[file] for file in right)
                yield Finding("atomic", f"{where}, and {name_of(step)} is there with {whole} of {len(right)} whole files: a reader takes it for a "
                              "checkpoint. Write under another name and rename when everything is there", victim, name_of(step))
        if not any(trial["found"].get(name_of(step)) == expected(case, step) for step in (OLD, NEW)):
            yield Finding("atomic", f"{where}, and no whole checkpoint is left: the older one must stay until the new one is published", victim,
                          name_of(OLD))
        tries = [seen["trials"][number] for seen in evidence]
        failed = next(((rank, each) for rank, each in enumerate(tries) if each["again"] == "raised"), None)
        if failed:
            yield Finding("atomic", f"{where}; started again on the same disk, the save raises {failed[1]['error']}: what a dead run left "
                          "behind must be cleared away", failed[0])
        elif trial["after"].get(name_of(NEW)) != expected(case, NEW):
            yield Finding("atomic", f"{where}; started again on the same disk, the save does not make a whole {name_of(NEW)}", victim)
