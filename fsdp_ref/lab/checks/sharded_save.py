"""The exercise `sharded_save` (notebook 11): every rank writes its slice; the checkpoint gets its name all at once or never.

The disk, its kills and what a rank can know of another are the harness's (inside/disk.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .exercise import Case, Exercise
from .finding import Finding, careful, verdicts
from .inside.disk import digest
from .observe import Evidence
from .report import Verdict

OLD, NEW = 3, 7                              # the step that is saved already, and the one to save
GOOD = {"values": "every rank's file holds its tensors",
        "no hang": "every rank returned, every time",
        "sharding": "each rank writes what it holds, and nothing else",
        "order": "whoever publishes knows that all has been written and synced, and nobody returns before that",
        "atomic": "after a kill at any operation the disk holds whole checkpoints only, and the next try works"}


def cases(seed: int) -> Iterator[Case]:
    """Ranks hold different numbers, the last one nothing of `bias`."""
    for world, start in ((2, 61), (3, seed)):
        make = torch.Generator().manual_seed(start)
        steps = [[{"weight": torch.randn(3, 4, generator=make), "bias": torch.randn(2 if rank < world - 1 else 0, generator=make)}
                  for rank in range(world)] for _ in (OLD, NEW)]
        yield Case(world, f"{world} ranks, the last without a bias", shared={"old": OLD, "new": NEW, "older": steps[0]},
                   each=[{"shards": tensors} for tensors in steps[1]], known={OLD: steps[0], NEW: steps[1]}, one_folder=True,
                   limit=15.0, cpu=8)


def name_of(step: int) -> str:
    """The folder of a step."""
    return f"step-{step:08d}"


@careful
def judge(case: Case, evidence: Evidence) -> list[Verdict]:
    """What is wrong, the cause before what follows from it."""
    looks = (_made, _known, _ended, _sharding, _files, _kills)
    return verdicts([finding for look in looks for finding in look(case, evidence.values())], GOOD)


def expected(case: Case, step: int) -> dict[str, str]:
    """What the files of a checkpoint hold."""
    return {f"rank-{rank}.safetensors": digest(case.known[step][rank]) for rank in range(case.world)}


def _made(case: Case, evidence: list[dict]) -> Iterator[Finding]:
    """Whoever uses a folder that another rank made must know that it is there."""
    made = [(rank, row) for rank, seen in enumerate(evidence) for row in seen["log"] if row["what"] == "mkdir"]
    for maker, folder in made:
        for rank, seen in enumerate(evidence):
            early = next((row for row in seen["log"] if rank != maker and row["what"] == "write" and row["barriers"] <= folder["barriers"]
                          and row["path"].startswith(folder["path"] + "/")), None)
            if early and not any(other == rank and row["path"] == folder["path"] for other, row in made):
                yield Finding("order", f"it writes into {folder['path']} without knowing that rank {maker} has made it: no barrier stands "
                              "between the two", rank, early["path"])


def _ended(case: Case, evidence: list[dict]) -> Iterator[Finding]:
    for rank, seen in enumerate(evidence):
        if seen["end"]["how"] == "stuck":
            yield Finding("no hang", f"it waits in its barrier number {seen['end']['barriers']}, and another rank has returned without it: "
                          "every rank must call the same barriers", rank)
        elif seen["end"]["how"] == "raised":
            yield Finding("values", f"the save raised {seen['end']['error']}", rank)


def _sharding(case: Case, evidence: list[dict]) -> Iterator[Finding]:
    for rank, seen in enumerate(evidence):
        written = sum(row["payload"] for row in seen["log"] if row["what"] == "write")
        own = sum(tensor.numel() * tensor.element_size() for tensor in case.known[NEW][rank].values())
        if written > own:
            yield Finding("sharding", f"it writes {written} bytes and holds {own}: that is what belongs to other ranks, and needs the "
                          "whole model in its memory", rank)
        elif written < own and evidence[rank]["end"]["how"] == "returned":
            yield Finding("sharding", f"it writes {written} of the {own} bytes it holds", rank)


def _files(case: Case, evidence: list[dict]) -> Iterator[Finding]:
    found, right = evidence[0]["end"]["found"].get(name_of(NEW)), expected(case, NEW)
    if any(seen["end"]["how"] != "returned" for seen in evidence):
        return
    if found is None:
        yield Finding("values", f"there is no folder {name_of(NEW)} after the save")
        return
    for file in right:
        if file not in found:
            yield Finding("values", f"{name_of(NEW)} has no {file}; it holds {', '.join(found) or 'nothing'}: ranks that write under one "
                                    "name overwrite each other", parameter=file)
        elif found[file] != right[file]:
            yield Finding("values", f"{file} does not hold the tensors of its rank", parameter=file)


def _known(case: Case, evidence: list[dict]) -> Iterator[Finding]:
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
            synced = any(other["what"] == "sync" and later > place and before(later, other)
                         and other["path"] in _names_of(row["path"], seen["log"][place:later]) for later, other in enumerate(seen["log"]))
            if not before(place, row):
                yield Finding("order", f"rank {publisher} publishes the checkpoint without knowing that rank {rank} has written {file}: no "
                                       "barrier stands between the two", rank, file)
            elif not synced:
                yield Finding("order", f"{file} is not synced before the checkpoint is published: after a power cut it may be empty "
                                       "although its name is there", rank, file)
        if rank != publisher and seen["end"]["how"] == "returned" and seen["end"]["barriers"] <= rename["barriers"]:
            yield Finding("order", f"the save returns on rank {rank} before it can know that rank {publisher} has published the "
                                   "checkpoint: a barrier is missing after the rename", rank)


def _names_of(path: str, log: list[dict]) -> set[str]:
    """The names a file had while these operations went on."""
    names = {path}
    for row in (row for row in log if row["what"] == "rename"):
        names |= {row["to"] + name[len(row["path"]):] for name in names if f"{name}/".startswith(row["path"] + "/")}
    return names


def _kills(case: Case, evidence: list[dict]) -> Iterator[Finding]:
    """Atomic: what a reader finds after every kill, and what a second try comes to."""
    for number, trial in enumerate(evidence[0]["trials"]):
        victim = trial["victim"]
        what = evidence[victim]["trials"][number]["what"]
        where = f"rank {victim} was killed {'in the middle of' if trial['half'] else 'before'} its operation {trial['at'] + 1} ({what})"
        for step in (OLD, NEW):
            found, right = trial["found"].get(name_of(step)), expected(case, step)
            if found is not None and found != right:
                whole = sum(found.get(file) == right[file] for file in right)
                yield Finding("atomic", f"{where}, and {name_of(step)} is there with {whole} of {len(right)} whole files: a reader takes "
                                        "it for a checkpoint. Write under another name and rename when "
                                        "everything is there", victim, name_of(step))
        if not any(trial["found"].get(name_of(step)) == expected(case, step) for step in (OLD, NEW)):
            yield Finding("atomic", f"{where}, and no whole checkpoint is left: the older one must stay until the new "
                                    "one is published", victim,
                          name_of(OLD))
        tries = [seen["trials"][number] for seen in evidence]
        failed = next(((rank, each) for rank, each in enumerate(tries) if each["again"] == "raised"), None)
        if failed:
            yield Finding("atomic", f"{where}; started again on the same disk, the save raises {failed[1]['error']}: what a dead run left "
                          "behind must be cleared away", failed[0])
        elif trial["after"].get(name_of(NEW)) != expected(case, NEW):
            yield Finding("atomic", f"{where}; started again on the same disk, the save does not make a whole {name_of(NEW)}", victim)
    full = evidence[0]["end"]
    if full["how"] == "returned" and full["found"].get(name_of(OLD)) != expected(case, OLD):
        yield Finding("atomic", f"{name_of(OLD)} is gone after the save; older checkpoints stay, somebody else decides which to delete", 0,
                      name_of(OLD))


EXERCISE = Exercise(
    id="sharded_save", notebook="11", title="A sharded checkpoint, all or nothing",
    task="Save this rank's shards (name -> tensor) as the file rank-R.safetensors of the folder step-SSSSSSSS (eight digits) at the root "
         "of the disk. Any rank may be killed at any moment: a folder with such a name must never hold anything but a whole checkpoint, "
         "and older checkpoints stay. Return when the checkpoint is there for all. The disk has mkdir, write(path, tensors), sync, rename, "
         "remove, exists and list; a file is safe from a power cut only after its sync; rename happens at once or not at all. barrier() "
         "waits for all ranks.",
    signature="def sharded_save(disk, step, shards, rank, world, barrier):",
    points={"values": 2, "no hang": 1, "sharding": 1, "order": 2, "atomic": 3},
    hints=("A reader believes names. Which single operation gives a whole folder its name?",
           "Write into a folder with another name, sync, and let one rank rename it when it can know that all others are ready. What must "
           "stand between their work and its rename, and between its rename and their return?",
           "Rank 0 clears away what a dead run left, and makes the folder; barrier; all write and sync; barrier; rank 0 renames and syncs "
           "the root; barrier."),
    cases=cases, judge=judge)
