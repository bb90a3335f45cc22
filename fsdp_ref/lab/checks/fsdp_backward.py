"""The exercise `fsdp_backward`: weights gathered again for backward, the gradient averaged and cut, and nothing whole afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .finding import Finding, close, largest, ratio
from .fsdp_forward import padded_bytes
from .units import Watch, inputs_of, layer, make_units, weights_of

PROPERTIES = ("values", "sharding", "lifetime", "order", "bytes", "no hang")


def cases(seed: int) -> list[dict]:
    """One backward; then two that accumulate, on sizes that do not divide."""
    return [{"world": 2, "layers": [[6, 4], [4, 4], [4, 2]], "batch": 3, "steps": 1, "seed": 21},
            {"world": 3, "layers": [[5, 7], [7, 3], [3, 5]], "batch": 2, "steps": 2, "seed": seed}]


def run(student, case: dict, rank: int, world: int) -> dict:
    """Forward and backward of a stack of units, layer by layer, as autograd goes through it; the student's pair around each backward."""
    units = make_units(case, rank, world)
    watch = Watch(units)
    pairs = [student(unit, watch.all_gather, watch.reduce_scatter) for unit in units]
    empty: list[list[int]] = []
    for step in range(case["steps"]):
        inputs, outputs = _forward(case, rank, step, units, watch)
        gradient = torch.ones_like(outputs[-1])
        for index in reversed(range(len(units))):
            unit, (before, after) = units[index], pairs[index]
            watch.point = f"step {step}, before {unit.name}"
            before()
            if not unit.is_whole or not watch.storages[unit.name].nbytes():
                empty.append([step, index])
                return {"empty": empty, "log": watch.log, "shards": []}
            watch.point = f"step {step}, backward of {unit.name}"
            torch.autograd.backward(outputs[index], gradient)
            watch.point = f"step {step}, after {unit.name}"
            after()
            gradient = inputs[index].grad
            outputs[index] = None
            watch.look(f"step {step}, after {unit.name}", [*_activations(inputs, outputs, gradient), *_shards(units)])
            watch.log[-1]["gradients"] = sum(each.grad.numel() * 4 for each in unit.module.parameters() if each.grad is not None)
    return {"empty": empty, "log": watch.log, "shards": [unit.grad_shard for unit in units]}


def _activations(inputs: list, outputs: list, gradient: torch.Tensor) -> list[torch.Tensor]:
    """The harness's own tensors: they are nobody's fault."""
    return [each for each in (*inputs, *outputs, gradient, *(x.grad for x in inputs)) if each is not None]


def _shards(units: list) -> list[torch.Tensor]:
    return [unit.grad_shard for unit in units if isinstance(unit.grad_shard, torch.Tensor) and unit.grad_shard.numel() <= unit.shard.numel()]


def _forward(case: dict, rank: int, step: int, units: list, watch: Watch) -> tuple[list, list]:
    """What the exercise before this one does, by the harness: inputs that collect gradients, and outputs."""
    x = inputs_of(case, rank, step)
    inputs, outputs = [], []
    for unit in units:
        unit.full.untyped_storage().resize_(unit.full.numel() * 4)
        with torch.no_grad():
            watch.fill(unit)
        inputs.append(x.detach().requires_grad_())
        outputs.append(torch.tanh(unit.module(inputs[-1])))
        unit.full.untyped_storage().resize_(0)
        x = outputs[-1]
    return inputs, outputs


def local_gradients(case: dict, rank: int, step: int) -> list[torch.Tensor]:
    """The flat gradient of each unit from the batch of one rank."""
    flats = [flat.clone().requires_grad_() for flat in weights_of(case)]
    x = inputs_of(case, rank, step)
    for (inside, outside), flat in zip(case["layers"], flats, strict=True):
        x = layer(flat, inside, outside, x)
    x.sum().backward()
    return [flat.grad for flat in flats]


def shard_of(flat: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """This rank's slice, zeros where it is padding."""
    rows = -(-flat.numel() // world)
    padded = torch.zeros(rows * world)
    padded[: flat.numel()] = flat
    return padded[rank * rows:][:rows]


def judge(case: dict, evidence: list[dict]) -> list[Finding]:
    """What is wrong, the cause before what follows from it."""
    by_rank = [[local_gradients(case, rank, step) for step in range(case["steps"])] for rank in range(case["world"])]
    found: list[Finding] = []
    for look in (_empty, _shapes, _calls, _numbers, _held):
        for rank, seen in enumerate(evidence):
            found += look(case, rank, seen, by_rank)
    return found


def _empty(case: dict, rank: int, seen: dict, by_rank: list) -> Iterator[Finding]:
    for step, index in seen["empty"]:
        gathered = any(row["what"] == "all-gather" and row["point"] == f"step {step}, before unit {index}" for row in seen["log"])
        why = ("it was gathered into other memory, but autograd saved views of unit.full, so the storage of unit.full must be filled again"
               if gathered else "forward freed them, and no all-gather was called before backward")
        yield Finding("values", f"unit {index} has no weights when its backward reads them: {why}", rank, f"unit {index}", step)


def _calls(case: dict, rank: int, seen: dict, by_rank: list) -> Iterator[Finding]:
    """Order and bytes: in each step, from the last unit to the first, one gather before and one reduction after."""
    if seen["empty"]:
        return
    sizes = dict(zip((f"unit {index}" for index in range(len(case["layers"]))), padded_bytes(case), strict=True))
    for step in range(case["steps"]):
        for name, size in reversed(sizes.items()):
            for where, what in (("before", "all-gather"), ("after", "reduce-scatter")):
                here = [row for row in seen["log"] if row["point"] == f"step {step}, {where} {name}" and row["what"] != "alive"]
                right = [row for row in here if row["what"] == what]
                wrong = [row for row in here if row["what"] != what]
                if wrong:
                    yield Finding("order", f"{where} the backward of {name} comes {wrong[0]['what']}: the order is all-gather, backward, "
                                  "reduce-scatter, unit by unit from the last to the first", rank, name, step)
                if not right:
                    yield Finding("order", f"no {what} of {name} is called {where} its backward (step {step})", rank, name, step)
                moved = sum(row["bytes"] for row in here)
                if moved > size:
                    yield Finding("bytes", f"{moved} bytes are moved {where} the backward of {name}, where one {what} of {size} is enough",
                                  rank, name, step)


def _shapes(case: dict, rank: int, seen: dict, by_rank: list) -> Iterator[Finding]:
    last = case["steps"] - 1
    for index, got in enumerate(seen["shards"]):
        name, right = f"unit {index}", shard_of(by_rank[0][0][index], rank, case["world"])
        if not isinstance(got, torch.Tensor):
            yield Finding("values", f"{name} has no gradient: unit.grad_shard was never set", rank, name, last)
        elif got.numel() >= by_rank[0][0][index].numel() and got.shape != right.shape:
            yield Finding("sharding", f"unit.grad_shard of {name} has {got.numel()} elements, the whole gradient: it is not sharded", rank, name,
                          last)
        elif got.shape != right.shape:
            yield Finding("values", f"unit.grad_shard of {name} has the shape {tuple(got.shape)}, and unit.shard has {tuple(right.shape)}",
                          rank, name, last)


def _numbers(case: dict, rank: int, seen: dict, by_rank: list) -> Iterator[Finding]:
    world, last = case["world"], case["steps"] - 1
    for index, got in enumerate(seen["shards"]):
        name = f"unit {index}"
        flats = [sum(by_rank[r][step][index] for r in range(world)) / world for step in range(last + 1)]
        right, own = shard_of(sum(flats), rank, world), by_rank[rank]
        if isinstance(got, torch.Tensor) and got.shape == right.shape and not close(got, right):
            local = shard_of(sum(own[step][index] for step in range(last + 1)), rank, world)
            yield Finding("values", _why(case, index, rank, got, right, local, flats), rank, name, last)


def _why(case: dict, index: int, rank: int, got: torch.Tensor, right: torch.Tensor, local: torch.Tensor, flats: list) -> str:
    """The numbers of one gradient shard in words."""
    world, k = case["world"], ratio(got, right)
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
    inside, outside = case["layers"][index]
    total = sum(flats)
    swapped = torch.cat([total[inside * outside:], total[: inside * outside]])
    if close(got, shard_of(swapped, rank, world)):
        return "the elements are in another order than in unit.full: the bias comes before the weight"
    if any(close(got, shard_of(total, other, world)) for other in range(world) if other != rank):
        return "this is the slice of another rank"
    return f"the gradient differs from the mean over the ranks by up to {largest(got, right):.3g}"


def _held(case: dict, rank: int, seen: dict, by_rank: list) -> Iterator[Finding]:
    """Lifetime and sharding after each unit's backward."""
    for row in (row for row in seen["log"] if row["what"] == "alive"):
        name, step = row["point"].split("after ")[1], int(row["point"].split()[1].strip(","))
        if row["gradients"]:
            yield Finding("lifetime", f"the whole gradients of {name} are still alive after its backward ({row['gradients']} bytes): set "
                          "the parameters' .grad to None when the reduced slice is there", rank, name, step)
        elif row["units"]:
            yield Finding("lifetime", f"the whole weights of {name} are still alive after its backward ({row['units']} bytes)", rank, name, step)
        elif row["other"]:
            yield Finding("lifetime", f"{row['other']} bytes of other tensors are kept after the backward of {name}", rank, name, step)
