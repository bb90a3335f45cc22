"""The exercise `fsdp_backward` (notebook 08): weights gathered again, the gradient averaged and cut, and nothing whole afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from .exercise import Case, Exercise
from .finding import Finding, Picture, careful, close, largest, ratio, verdicts
from .layers import case_of, drawn_layers, layer, names, padded_bytes, shard_of
from .observe import Evidence
from .report import Verdict

SLACK = 8                                    # bytes that an answer may keep for itself
GOOD = {"values": "each rank holds its slice of the mean gradient, added up over the backwards",
        "sharding": "unit.grad_shard is as long as unit.shard",
        "lifetime": "after a unit's backward neither its weights nor its gradient are whole",
        "order": "all-gather, backward, reduce-scatter, from the last unit to the first",
        "bytes": "one all-gather and one reduce-scatter of each unit"}


def cases(seed: int) -> Iterator[Case]:
    """One backward; then several that accumulate, on sizes that do not divide."""
    yield case_of(2, [(6, 4), (4, 4), (4, 2)], 3, 1, 21)
    yield case_of(3, [(5, 7), (7, 3), (3, 5)], 2, 2, seed)
    yield case_of(4, drawn_layers(random.Random(seed), 2), 2, 2, seed + 1)


@careful
def judge(case: Case, evidence: Evidence) -> list[Verdict]:
    """What is wrong, the cause before what follows from it."""
    world, steps = case.world, case.known["steps"]
    by_rank = [[local_gradients(case, rank, step) for step in range(steps)] for rank in range(world)]
    found = [finding for look in (_empty, _shapes, _calls, _held, _numbers) for rank, seen in enumerate(evidence.values())
             for finding in look(case, evidence, rank, seen, by_rank)]
    order = [f"{what} {name.split()[1]}" for name in reversed(names(case)) for what in ("gather", "reduce")]
    words = {"all_gather": "gather", "reduce_scatter": "reduce"}
    actual = [[f"{words.get(event.kind, event.kind)} {event.step.split()[-1]}" for event in evidence.of(rank)
               if event.step.startswith("step 0")] for rank in range(world)]
    return verdicts(found, GOOD, Picture("collectives of one backward, in order, with the unit's number", [order] * world, actual))


def local_gradients(case: Case, rank: int, step: int) -> list[torch.Tensor]:
    """The flat gradient of each unit from the batch of one rank."""
    flats = [flat.clone().requires_grad_() for flat in case.known["flats"]]
    x = case.known["inputs"][rank][step]
    for (inside, outside), flat in zip(case.known["layers"], flats, strict=True):
        x = layer(flat, inside, outside, x)
    x.sum().backward()
    return [flat.grad for flat in flats]


def _empty(case: Case, evidence: Evidence, rank: int, seen: dict, by_rank: list) -> Iterator[Finding]:
    for step, index in seen["empty"]:
        gathered = evidence.of(rank, "all_gather", step=f"step {step}, before unit {index}")
        why = ("it was gathered into other memory, but autograd saved views of unit.full, so the storage of unit.full must be filled again"
               if gathered else "forward freed them, and no all-gather was called before backward")
        yield Finding("values", f"unit {index} has no weights when its backward reads them: {why}", rank, f"unit {index}", step)


def _shapes(case: Case, evidence: Evidence, rank: int, seen: dict, by_rank: list) -> Iterator[Finding]:
    last = case.known["steps"] - 1
    for index, got in enumerate(seen["shards"]):
        name, right = f"unit {index}", shard_of(by_rank[0][0][index], rank, case.world)
        if not isinstance(got, torch.Tensor):
            yield Finding("values", f"{name} has no gradient: unit.grad_shard was never set", rank, name, last)
        elif got.numel() >= by_rank[0][0][index].numel() and got.shape != right.shape:
            yield Finding("sharding", f"unit.grad_shard of {name} has {got.numel()} elements, the whole gradient: it "
                                      "is not sharded", rank, name,
                          last)
        elif got.shape != right.shape:
            yield Finding("values", f"unit.grad_shard of {name} has the shape {tuple(got.shape)}, and unit.shard has {tuple(right.shape)}",
                          rank, name, last)


def _calls(case: Case, evidence: Evidence, rank: int, seen: dict, by_rank: list) -> Iterator[Finding]:
    """Order and bytes: in each step, from the last unit to the first, one gather before and one reduction after."""
    if seen["empty"]:
        return
    for step in range(case.known["steps"]):
        for name, size in reversed(list(zip(names(case), padded_bytes(case), strict=True))):
            for where, what in (("before", "all_gather"), ("after", "reduce_scatter")):
                yield from _call(evidence, rank, step, name, size, where, what)


def _call(evidence: Evidence, rank: int, step: int, name: str, size: int, where: str, what: str) -> Iterator[Finding]:
    here, called = evidence.of(rank, step=f"step {step}, {where} {name}"), what.replace("_", "-")
    wrong = [event for event in here if event.kind != what]
    if wrong:
        yield Finding("order", f"{where} the backward of {name} comes {wrong[0].kind.replace('_', '-')}: the order is all-gather, "
                               "backward, reduce-scatter, unit by unit from the last to the first", rank, name, step)
    if len(here) == len(wrong):
        yield Finding("order", f"no {called} of {name} is called {where} its backward", rank, name, step)
    moved = sum(event.nbytes * (evidence.world if event.kind == "all_gather" else 1) for event in here)
    if moved > size:
        yield Finding("bytes", f"{moved} bytes are moved {where} the backward of {name}, where one {called} of "
                               f"{size} is enough", rank, name,
                      step)


def _numbers(case: Case, evidence: Evidence, rank: int, seen: dict, by_rank: list) -> Iterator[Finding]:
    world, steps = case.world, case.known["steps"]
    for index, got in enumerate(seen["shards"]):
        flats = [sum(by_rank[r][step][index] for r in range(world)) / world for step in range(steps)]
        right = shard_of(sum(flats), rank, world)
        if isinstance(got, torch.Tensor) and got.shape == right.shape and not close(got, right):
            local = shard_of(sum(by_rank[rank][step][index] for step in range(steps)), rank, world)
            yield Finding("values", _why(case, index, rank, got, local, flats), rank, f"unit {index}", steps - 1)


def _why(case: Case, index: int, rank: int, got: torch.Tensor, local: torch.Tensor, flats: list) -> str:
    """The numbers of one gradient shard in words."""
    world, total = case.world, sum(flats)
    right = shard_of(total, rank, world)
    k = ratio(got, right)
    if k is not None and abs(k - world) < 0.01:
        return f"the gradient is exactly {k:.2f} times the reference: summed over {world} ranks, not averaged"
    if k is not None and abs(k * world - 1) < 0.01:
        return f"the gradient is exactly 1/{world} of the reference: divided by the number of ranks twice"
    if k is not None:
        return f"the gradient is exactly {k:.2f} times the reference"
    if any(close(got, scale * local) for scale in (1.0, 1 / world)):
        return "the gradient is this rank's own, not reduced: it is the slice of the local gradient"
    if len(flats) > 1 and close(got, shard_of(flats[-1], rank, world)):
        return "the gradient is that of the last backward alone: the one before it was overwritten, and gradients accumulate"
    inside, outside = case.known["layers"][index]
    if close(got, shard_of(torch.cat([total[inside * outside:], total[: inside * outside]]), rank, world)):
        return "the elements are in another order than in unit.full: the bias comes before the weight"
    if any(close(got, shard_of(total, other, world)) for other in range(world) if other != rank):
        return "this is the slice of another rank"
    return f"the gradient differs from the mean over the ranks by up to {largest(got, right):.3g}"


def _held(case: Case, evidence: Evidence, rank: int, seen: dict, by_rank: list) -> Iterator[Finding]:
    """Lifetime: what is left after each unit's backward."""
    for row in seen["log"]:
        step, name = row["point"].split(", after ")
        if row["gradients"]:
            yield Finding("lifetime", f"the whole gradients of {name} are still alive after its backward ({row['gradients']} bytes): set "
                          "the parameters' .grad to None when the reduced slice is there", rank, name, step)
        elif row["units"]:
            yield Finding("lifetime", f"the whole weights of {name} are still alive after its "
                                      f"backward ({row['units']} bytes)", rank, name, step)
        elif row["other"] > SLACK:
            yield Finding("lifetime", f"{row['other']} bytes of other tensors are kept after the backward of {name}", rank, name, step)


EXERCISE = Exercise(
    id="fsdp_backward", notebook="08", title="FSDP's backward: gather again, reduce, free",
    task="Return two functions (before, after) for one unit whose forward has run and whose weights were freed. before() runs just before "
         "the unit's backward and must make unit.full whole again. after() runs when the .grad of all its parameters is there: put this "
         "rank's slice of the mean gradient into unit.grad_shard (padded like unit.shard; add to what is there), then free the whole "
         "gradients and weights. reduce_scatter(out, full) gives this rank's slice of the sum over the ranks.",
    signature="def fsdp_backward(unit, all_gather, reduce_scatter):",
    points={"values": 3, "sharding": 1, "lifetime": 2, "order": 2, "bytes": 1, "no hang": 1},
    hints=("Write down what is whole on a rank before, during and after one unit's backward. Which of it must be gone at the end?",
           "Autograd saved views of unit.full, so that same storage has to be filled. The flat gradient has the parameters' order, weight "
           "then bias, and zeros where unit.full has padding.",
           "After: a zero tensor as long as unit.full takes both gradients, reduce it into a new tensor like unit.shard, divide that by "
           "the number of ranks, add it to unit.grad_shard (None at first), set both .grad to None, and free the storage."),
    cases=cases, judge=judge)
