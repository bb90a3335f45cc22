"""The exercise `fsdp_forward` (notebook 07): whole weights exist while their unit computes, and at no other time."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from .exercise import Case, Exercise
from .finding import Finding, Picture, careful, close, largest, verdicts
from .layers import CHANGE, case_of, drawn_layers, layer, names, padded_bytes
from .observe import Evidence
from .report import Verdict

SLACK = 8                                    # bytes that an answer may keep for itself
GOOD = {"values": "the output is that of the whole weights, in each step",
        "sharding": "between forwards a rank holds its shards and nothing else",
        "lifetime": "a unit is whole while it computes, and its storage is empty afterwards",
        "order": "each unit is gathered before it computes, in every step",
        "bytes": "one all-gather of each unit in each forward"}


def cases(seed: int) -> Iterator[Case]:
    """Sizes that divide, then sizes that do not; two steps, between which the shards change."""
    draw = random.Random(seed)
    yield case_of(2, [(6, 4), (4, 4), (4, 2)], 3, 2, 11)
    yield case_of(3, [(5, 7), (7, 3), (3, 5), (5, 1)], 2, 2, seed)
    yield case_of(4, drawn_layers(draw, 3), 2, 3, seed + 1)


@careful
def judge(case: Case, evidence: Evidence) -> list[Verdict]:
    """What is wrong, the cause before what follows from it."""
    found = [finding for rank, seen in enumerate(evidence.values()) for look in (_held, _gathers, _numbers)
             for finding in look(case, evidence, rank, seen)]
    points = [row for row in evidence.values()[0]["log"] if "after" in row["point"]][: len(names(case))]
    actual = [[f"{row['point'].split('after ')[1]}: {len(row['whole'])} whole" for row in _after(seen)][: len(points)]
              for seen in evidence.values()]
    expected = [[f"{name}: 0 whole" for name in names(case)]] * case.world
    return verdicts(found, GOOD, Picture("units that are whole after each unit's forward", expected, actual))


def _after(seen: dict) -> list[dict]:
    return [row for row in seen["log"] if "after" in row["point"]]


def _held(case: Case, evidence: Evidence, rank: int, seen: dict) -> Iterator[Finding]:
    """Sharding and lifetime: bytes at rest, while a unit computes, and after it."""
    sizes = padded_bytes(case)
    most = max(len(row["whole"]) for row in seen["log"])
    for row in seen["log"]:
        held, step = row["units"] + row["other"], row["point"].split(",")[0]
        if row["point"] == "at rest" and held > SLACK:
            yield Finding("sharding", f"before any forward it already holds {held} bytes of whole weights: all units are whole on every "
                                      "rank, nothing is sharded", rank, "unit 0", "at rest")
        elif "after" in row["point"] and held > SLACK:
            yield Finding("lifetime", _kept(row, most), rank, row["point"].split("after ")[1], step)
        elif "computes" in row["point"] and held > 2 * max(sizes) + SLACK:
            yield Finding("lifetime", f"{held} bytes of whole weights are alive at once ({row['point']}); one unit and one that is "
                          f"prefetched are at most {2 * max(sizes)}", rank, row["point"].split(", ")[1].removesuffix(" computes"), step)


def _kept(row: dict, most: int) -> str:
    """Why bytes are alive after a unit's forward; `most`: how many units are whole at the worst moment."""
    if row["replaced"]:
        return (f"unit.full was replaced by another tensor and {row['units']} bytes are still alive ({row['point']}): dropping a reference "
                "frees nothing while the module's parameters are views of the storage; give the storage size 0")
    if not row["units"]:
        return f"{row['other']} bytes of copies are kept after forward ({row['point']}): whole weights were put aside in another tensor"
    if most > 2:
        return (f"{row['units']} bytes of whole weights are alive after forward ({row['point']}), in the end of {most} units at once: "
                "their storage is never freed")
    return (f"a unit is still whole after its forward, {row['units']} bytes ({row['point']}): it is freed too late, when the next one is "
            "gathered, and the last one never")


def _gathers(case: Case, evidence: Evidence, rank: int, seen: dict) -> Iterator[Finding]:
    """Order and bytes: one all-gather of each unit in each step, before the unit computes."""
    early = evidence.of(rank, step="at rest")
    for step in range(case.known["steps"]):
        for name, size in zip(names(case), padded_bytes(case), strict=True):
            mine = evidence.of(rank, step=f"step {step}, before {name}")
            late = evidence.of(rank, step=f"step {step}, after {name}")
            if late:
                yield Finding("order", f"{late[0].kind.replace('_', '-')} is called after the forward of {name}; gather before it, and "
                              "afterwards only free", rank, name, step)
            elif not mine:
                yield Finding("order", f"{name} is not gathered in step {step}, although the shards may have changed since the last gather"
                              if step or early else f"no all-gather of {name} is called before its forward: its memory "
                                                    "holds no weights", rank,
                              name, step)
            sent = sum(event.nbytes * case.world for event in mine + late)
            if sent > size:
                yield Finding("bytes", f"{name} moves {sent} bytes a forward where one all-gather of {size} is enough: it is gathered "
                              f"{sent / size:g} times", rank, name, step)


def _numbers(case: Case, evidence: Evidence, rank: int, seen: dict) -> Iterator[Finding]:
    for step, index in seen["empty"]:
        yield Finding("values", f"unit {index} has no weights when its forward reads them: the storage of its parameters is empty", rank,
                      f"unit {index}", step)
    if seen["empty"]:
        return
    for step, output in enumerate(seen["outputs"]):
        right = expected(case, rank, step)
        if not close(output, right):
            stale = step and close(output, expected(case, rank, step, step - 1))
            yield Finding("values", "the output is that of the weights before the optimizer's step: stale by one step" if stale else
                          f"the output differs from that of the whole weights by up to {largest(output, right):.3g}", rank, "output", step)


def expected(case: Case, rank: int, step: int, changes: int | None = None) -> torch.Tensor:
    """The output from whole weights after so many of the optimizer's changes (default: one a step)."""
    x = case.known["inputs"][rank][step]
    for (inside, outside), flat in zip(case.known["layers"], case.known["flats"], strict=True):
        x = layer(flat + CHANGE * (step if changes is None else changes), inside, outside, x)
    return x


EXERCISE = Exercise(
    id="fsdp_forward", notebook="07", title="FSDP's forward: gather, compute, free",
    task="Return two functions (before, after) for one unit. before() runs just before the unit's forward and must make its weights whole; "
         "after() runs just after it and must free them. unit.shard is this rank's slice (1-D, padded), unit.full the whole flat "
         "parameter, unit.world times as long, of which the module's parameters are views; at rest its storage has size 0. all_gather(out, "
         "mine) fills out with everyone's mine in rank order.",
    signature="def fsdp_forward(unit, all_gather):",
    points={"values": 2, "sharding": 2, "lifetime": 3, "order": 1, "bytes": 1, "no hang": 1},
    hints=("A tensor's memory is its storage. How many tensors share the storage of unit.full, and what happens to it when you only drop "
           "one of them?",
           "`tensor.untyped_storage().resize_(n)` changes how many bytes a storage has, for all its views at once: n = 0 frees it.",
           "Before: give the storage of unit.full its bytes back (elements times bytes an element), then gather into it. After: size 0. Do "
           "nothing else, and nothing outside of the two functions."),
    cases=cases, judge=judge)
