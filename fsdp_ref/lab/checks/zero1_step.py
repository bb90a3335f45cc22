"""The exercise `zero1_step` (notebook 05): each rank updates its slice of the parameters and keeps the momentum of that slice alone."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from .exercise import Case, Exercise
from .observe import Evidence, short
from .report import Verdict, fails, passes
from .words import bound, difference

STEPS, LR, ROOM = 3, 0.1, 64            # ROOM: bytes for counters and other scalars
REDUCTIONS, GATHERINGS = ("reduce_scatter", "all_reduce", "reduce", "all_to_all"), ("all_gather", "broadcast", "gather", "all_reduce")


def cases(seed: int) -> Iterator[Case]:
    """Two known cases, then drawn ones: 2 to 4 ranks, other lengths and dtypes."""
    draw = random.Random(seed)
    make = torch.Generator().manual_seed(seed)
    for world, each, dtype in [(4, 30, torch.float32), (2, 40, torch.float32), (3, draw.randint(20, 60), torch.float64),
                               (4, draw.randint(20, 60), torch.float32)]:
        flat = torch.randn(world * each, generator=make, dtype=dtype)
        gradients = torch.randn(world, STEPS, world * each, generator=make, dtype=dtype)
        yield Case(world, f"{world} ranks, {world * each} parameters, {short(dtype)}", {"flat": flat, "lr": LR},
                   [{"gradients": list(mine)} for mine in gradients.unbind(0)], {"flat": flat, "gradients": gradients})


def judge(case: Case, evidence: Evidence) -> list[Verdict]:
    """Values of every step, then who holds what, what else is alive, the calls, the bytes."""
    values = _values(case, evidence)
    if not values.passed:
        return [values]
    flat = case.known["flat"]
    slice_bytes = flat.numel() * flat.element_size() // case.world
    return [values, _sharding(evidence, slice_bytes), _lifetime(evidence, slice_bytes), _order(evidence), _bytes(evidence, slice_bytes)]


def train(flat: torch.Tensor, used: torch.Tensor, forget: bool = False) -> list[torch.Tensor]:
    """The parameters after each step when step s uses the gradient `used[s]`."""
    flat, velocity, found = flat.clone(), torch.zeros_like(flat), []
    for gradient in used:
        velocity = gradient if forget else 0.9 * velocity + gradient
        flat = flat - LR * velocity
        found.append(flat)
    return found


def mistakes(case: Case, rank: int, step: int) -> dict[str, torch.Tensor]:
    """What typical mistakes leave in `flat` on this rank after this step (from 0)."""
    flat, gradients, world = case.known["flat"], case.known["gradients"], case.world
    right = [flat, *train(flat, gradients.mean(0))]
    local = torch.stack([train(flat, gradients[r])[step].chunk(world)[r] for r in range(world)]).reshape(-1)
    own = [slice(rank * len(flat) // world, (rank + 1) * len(flat) // world)]
    only, stale = flat.clone(), right[step].clone()
    only[own[0]] = stale[own[0]] = right[step + 1][own[0]]
    moved = flat.roll(-(len(flat) // world))                # rank r's slice of the gradient lands on the parameters of slice r + 1
    return {
        "only right in its own slice, the others are those of the step before: they were gathered before the slice was updated": stale,
        "only its own slice is new": only,
        "is what it was before the first step: flat itself is unchanged; write the result into it": flat,
        "holds a step made with sums: the gradient was summed, not averaged": train(flat, gradients.sum(0))[step],
        "holds slices that were made with their owner's gradient alone: the gradient was never reduced": local,
        "holds another rank's slice of the parameters in each place, or of the gradient: both must be slice `rank`":
            train(moved, gradients.mean(0))[step],
        "is right in the first step only: the momentum starts from zero in every step; keep it in state":
            train(flat, gradients.mean(0), forget=True)[step],
    }


def _values(case: Case, evidence: Evidence) -> Verdict:
    flat = case.known["flat"]
    expected = train(flat, case.known["gradients"].mean(0))
    for step in range(STEPS):
        for rank, steps in enumerate(evidence.values("steps")):
            tolerance = bound(torch.cat([flat, case.known["gradients"].reshape(-1)]), case.world + step)
            wrong = difference(steps[step]["flat"], expected[step], what="flat", tolerance=tolerance)
            if wrong is None:
                continue
            told = _mistake(case, evidence, rank, step, steps[step]["flat"], tolerance) or wrong.words
            return fails("values", f"after step {step + 1} on rank {rank}, {told}", rank=rank, step=step + 1)
    return passes("values", "after every step every rank holds the new parameters of all slices")


def _mistake(case: Case, evidence: Evidence, rank: int, step: int, found: torch.Tensor, tolerance: float) -> str:
    """The first typical mistake that fits what is found on this rank, in words."""
    gathered = bool(evidence.of(rank, *GATHERINGS, step=f"step {step + 1}"))
    for words, other in mistakes(case, rank, step).items():
        early = "before the slice was updated" in words
        if isinstance(found, torch.Tensor) and found.shape == other.shape and bool(((found - other).abs() <= tolerance).all()):
            if early and not gathered or "own slice is new" in words and gathered:
                continue
            return f"{'' if words.startswith('only its own') else 'flat '}{words}"
    return ""


def _sharding(evidence: Evidence, each: int) -> Verdict:
    """Who holds whose momentum between steps."""
    world = evidence.world
    expected = [["momentum" if place == rank else "" for place in range(world)] for rank in range(world)]
    whole = [any(max(entry["largest"], entry["beside"]) >= world * each for entry in steps) for steps in evidence.values("steps")]
    actual = [["momentum"] * world if whole[rank] else expected[rank] for rank in range(world)]
    shown = {"expected": expected, "actual": actual, "pictured": "which slices of the momentum a rank holds"}
    if any(whole):
        who = "every rank holds" if all(whole) else f"rank {whole.index(True)} holds"
        return fails("sharding", f"{who} the whole momentum, {world * each} bytes; a rank needs that of its slice, {each} bytes",
                     rank=whole.index(True), **shown)
    return passes("sharding", f"a rank holds the momentum of its slice, {each} bytes of {world * each}", **shown)


def _lifetime(evidence: Evidence, each: int) -> Verdict:
    for rank, steps in enumerate(evidence.values("steps")):
        for number, entry in enumerate(steps, 1):
            more = entry["state"] + entry["beside"] - each
            if more > ROOM:
                return fails("lifetime", f"{more} bytes beside flat and the momentum of a slice are still alive when the function returns; "
                             "keep nothing but the momentum, and no slice with memory of the whole", rank=rank, step=number)
    return passes("lifetime", "nothing but the momentum outlives the function")


def _order(evidence: Evidence) -> Verdict:
    for step in range(1, STEPS + 1):
        for rank in range(evidence.world):
            kinds = [kind for kind in evidence.kinds(rank, f"step {step}") if kind != "barrier"]
            if len(kinds) != 2 or kinds[0] not in REDUCTIONS or kinds[1] not in GATHERINGS:
                told = ", ".join(kinds).replace("_", "-") or "nothing"
                return fails("order", f"a step calls {told}; it needs one reduction of the gradient, then one gathering of the parameters",
                             rank=rank, step=step, expected=[["reduce-scatter", "all-gather"]] * evidence.world, pictured="calls in order",
                             actual=[[k.replace("_", "-") for k in evidence.kinds(r, f"step {step}")] for r in range(evidence.world)])
    return passes("order", "each step reduces the gradient, then gathers the parameters")


def _bytes(evidence: Evidence, each: int) -> Verdict:
    most = 2 * (evidence.world - 1) * each
    for step in range(1, STEPS + 1):
        for rank in range(evidence.world):
            if (sent := evidence.sent(rank, f"step {step}")) > most:
                why = "; where all-reduce is called, a reduce-scatter would do" if evidence.of(rank, "all_reduce") else ""
                return fails("bytes", f"rank {rank} sends {sent} bytes in a step and needs no more than {most}{why}", rank=rank, step=step)
    return passes("bytes", f"no rank sends more than {most} bytes in a step, as much as DDP's all-reduce")


EXERCISE = Exercise(
    id="zero1_step", notebook="05", title="A step of ZeRO-1",
    task="All parameters lie in one flat tensor, the same on every rank; its length divides by the number of ranks. Reduce this rank's "
         "gradient to the mean over all ranks, update your own slice with momentum (kept in state, for that slice alone), and put the new "
         "slices of all ranks into flat.",
    signature="def zero1_step(flat, grad, state, rank, world, lr):",
    points={"values": 2, "sharding": 3, "lifetime": 1, "order": 1, "bytes": 2, "no hang": 1},
    hints=("Which elements of the mean gradient does rank r need to update slice r, and which collective hands out just these?",
           "Three lines of work: a reduce-scatter gives you the mean gradient of your slice, momentum_step updates a copy of your slice, "
           "an all-gather puts everybody's slices into flat.",
           "With n = flat.numel() // world your slice is flat[rank * n:(rank + 1) * n]. dist.reduce_scatter_tensor with "
           "op=dist.ReduceOp.AVG fills a tensor of n elements from the whole gradient; dist.all_gather_into_tensor can write into flat "
           "itself."),
    cases=cases, judge=judge)
