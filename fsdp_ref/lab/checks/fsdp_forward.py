"""The exercise `fsdp_forward`: whole weights exist while their unit computes, and at no other time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .finding import Finding, close, largest
from .units import ELEMENT, Watch, inputs_of, layer, make_units, weights_of

PROPERTIES = ("values", "sharding", "lifetime", "order", "bytes", "no hang")


def cases(seed: int) -> list[dict]:
    """Two worlds, sizes that divide and sizes that do not."""
    return [{"world": 2, "layers": [[6, 4], [4, 4], [4, 2]], "batch": 3, "steps": 2, "seed": 11},
            {"world": 3, "layers": [[5, 7], [7, 3], [3, 5], [5, 1]], "batch": 2, "steps": 2, "seed": seed}]


def run(student, case: dict, rank: int, world: int) -> dict:
    """Two forwards of a stack of units on this rank, the shards changed in between as an optimizer would."""
    units = make_units(case, rank, world)
    watch = Watch(units)
    with torch.no_grad():
        hooks = [student(unit, watch.all_gather) for unit in units]
        watch.look("at rest")
        empty = []
        for step in range(case["steps"]):
            x = inputs_of(case, rank, step)
            for index, (unit, (before, after)) in enumerate(zip(units, hooks, strict=True)):
                watch.point = f"step {step}, before {unit.name}"
                before()
                watch.look(f"step {step}, {unit.name} computes", [x])
                if unit.is_whole:
                    x = torch.tanh(unit.module(x))
                else:
                    empty.append([step, index])
                    x = torch.zeros(case["batch"], case["layers"][index][1])
                after()
                watch.look(f"step {step}, after {unit.name}", [x])
            watch.outputs.append(x)
            for unit in units:
                unit.shard.add_(0.25)
    return {"outputs": watch.outputs, "log": watch.log, "empty": empty}


def expected(case: dict, rank: int, step: int, shift: int | None = None) -> torch.Tensor:
    """The output from whole weights; `shift`: after how many of the optimizer's changes (default: as many as there were steps)."""
    x = inputs_of(case, rank, step)
    for (inside, outside), flat in zip(case["layers"], weights_of(case), strict=True):
        x = layer(flat + 0.25 * (step if shift is None else shift), inside, outside, x)
    return x


def judge(case: dict, evidence: list[dict]) -> list[Finding]:
    """What is wrong, the cause before what follows from it."""
    found: list[Finding] = []
    for rank, seen in enumerate(evidence):
        found += [finding for look in (_held, _gathers, _numbers) for finding in look(case, rank, seen)]
    return found


def _held(case: dict, rank: int, seen: dict) -> Iterator[Finding]:
    """Sharding and lifetime: bytes at rest, while a unit computes, and after it."""
    sizes = padded_bytes(case)
    rows = [row for row in seen["log"] if row["what"] == "alive"]
    most = max(row["whole"] for row in rows)
    for row in rows:
        held = row["units"] + row["other"]
        if row["point"] == "at rest" and held:
            yield Finding("sharding", f"before any forward this rank already holds {held} bytes of whole weights: every rank holds all "
                          "units whole, nothing is sharded", rank, "unit 0")
        elif "after" in row["point"] and held:
            yield Finding("lifetime", _kept(row, most), rank, row["point"].split("after ")[1], int(row["point"].split()[1].strip(",")))
        elif "computes" in row["point"] and held > 2 * max(sizes):
            yield Finding("lifetime", f"{held} bytes of whole weights are alive at once ({row['point']}); one unit and one that is "
                          f"prefetched are at most {2 * max(sizes)}", rank, row["point"].split(", ")[1].removesuffix(" computes"))


def _kept(row: dict, most: int) -> str:
    """Why bytes are alive after a unit's forward; `most`: how many units are whole at the worst moment."""
    if row["replaced"]:
        return (f"unit.full was replaced by another tensor and {row['units']} bytes are still alive ({row['point']}): dropping a reference "
                "frees nothing while the module's parameters are views of the storage; give the storage size 0")
    if not row["units"]:
        return f"{row['other']} bytes of copies are kept after forward ({row['point']}): whole weights were put aside in another tensor"
    if most > 2:
        return (f"{row['units']} bytes of whole weights are alive after forward ({row['point']}), in the end of {most} units at once: their "
                "storage is never freed")
    return (f"a unit is still whole after its forward, {row['units']} bytes ({row['point']}): it is freed too late, when the next one is "
            "gathered, and the last one never")


def _gathers(case: dict, rank: int, seen: dict) -> Iterator[Finding]:
    """Order and bytes: one all-gather of each unit in each step, before the unit computes."""
    names = [f"unit {index}" for index in range(len(case["layers"]))]
    sizes = padded_bytes(case)
    for step in range(case["steps"]):
        for name, size in zip(names, sizes, strict=True):
            mine = [row for row in seen["log"] if row["what"] == "all-gather" and row["point"] == f"step {step}, before {name}"]
            late = [row for row in seen["log"] if row["what"] == "all-gather" and row["point"] == f"step {step}, {name} computes"]
            if late:
                yield Finding("order", f"{name} is gathered after its forward (step {step}): the all-gather belongs before it", rank, name, step)
            if not mine and not late:
                yield Finding("order", f"{name} is not gathered in step {step}, although the shards may have changed since the last gather"
                              if step else f"no all-gather of {name} was called before its forward: its memory holds no weights", rank, name, step)
            sent = sum(row["bytes"] for row in mine + late)
            if sent > size:
                yield Finding("bytes", f"{name} moves {sent} bytes a forward where one all-gather of {size} is enough: it is gathered "
                              f"{sent / size:g} times", rank, name, step)


def _numbers(case: dict, rank: int, seen: dict) -> Iterator[Finding]:
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


def padded_bytes(case: dict) -> list[int]:
    """Bytes of each unit's `full`, padding included."""
    return [ELEMENT * case["world"] * -(-(inside * outside + outside) // case["world"]) for inside, outside in case["layers"]]
