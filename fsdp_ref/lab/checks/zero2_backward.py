"""The exercise `zero2_backward` (notebook 05): each whole gradient becomes slices, and is freed, while backward is under way."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from .exercise import Case, Exercise
from .inside.zero2_backward import loss_of
from .observe import Evidence
from .report import Verdict, fails, passes
from .words import bound, difference

LAYERS, BATCH, ROOM = 16, 1, 64


def cases(seed: int) -> Iterator[Case]:
    """One known case, then drawn ones: 2 to 4 ranks, other widths."""
    draw = random.Random(seed)
    make = torch.Generator().manual_seed(seed)
    for world, small in [(4, 24), (2, 24), (3, draw.choice((24, 36))), (4, draw.choice((36, 48)))]:
        widths = [draw.choice((small, small + 12)) for _ in range(LAYERS)] + [small]
        weights = [torch.randn(a, b, generator=make) / a ** 0.5 for a, b in zip(widths, widths[1:], strict=False)]
        inputs = torch.randn(world, BATCH, widths[0], generator=make)
        yield Case(world, f"{world} ranks, {LAYERS} layers of {small} to {small + 12}", {"weights": weights},
                   [{"inputs": mine} for mine in inputs.unbind(0)], {"gradients": gradients(weights, inputs), "widest": small + 12})


def gradients(weights: list[torch.Tensor], inputs: torch.Tensor) -> list[torch.Tensor]:
    """For each layer, flat, the gradients of all ranks: [ranks, numel]."""
    found = []
    for mine in inputs:
        leaves = [weight.clone().requires_grad_() for weight in weights]
        found.append([grad.reshape(-1) for grad in torch.autograd.grad(loss_of(leaves, mine), leaves)])
    return [torch.stack(each) for each in zip(*found, strict=True)]


def judge(case: Case, evidence: Evidence) -> list[Verdict]:
    """Values, then what is alive afterwards, at the worst moment, the calls, the bytes."""
    values = _values(case, evidence)
    if not values.passed:
        return [values]
    sizes = [layer[0].numel() * layer.element_size() for layer in case.known["gradients"]]
    return [values, _order(case, evidence), _sharding(evidence, sizes), _lifetime(case, evidence, sizes), _bytes(evidence, sizes)]


def _values(case: Case, evidence: Evidence) -> Verdict:
    layers, world = case.known["gradients"], case.world
    for rank, (slices, name) in enumerate(zip(evidence.values("slices"), evidence.values("type"), strict=True)):
        if not isinstance(slices, list) or len(slices) != LAYERS:
            what = f"{len(slices)} tensors" if isinstance(slices, list) else f"a {name}"
            return fails("values", f"rank {rank} returned {what}; return a list with one slice for each of {LAYERS} parameters", rank=rank)
        expected = [layer.mean(0).chunk(world)[rank] for layer in layers]
        if not _same(slices, expected) and _same(slices, expected[::-1]):
            return fails("values", f"rank {rank}'s slices are right, but in the order of backward; it must be that of params", rank=rank)
        for number, (layer, found) in enumerate(zip(layers, slices, strict=True)):
            shifted = {f"another rank's slice of the mean gradient (rank {other}'s)": layer.mean(0).chunk(world)[other]
                       for other in range(world)}
            unlike = {"this rank's own: the gradient was never reduced": layer[rank].chunk(world)[rank], **shifted}
            what = f"the slice of parameter {number}"
            wrong = difference(found, expected[number], what=what, tolerance=_tolerance(layer), unlike=unlike, world=world)
            if wrong:
                return fails("values", f"on rank {rank}, {wrong.words}", rank=rank, parameter=str(number))
    return passes("values", "every rank holds its slice of every mean gradient, in the order of params")


def _tolerance(layer: torch.Tensor) -> float:
    return bound(layer, 4 * len(layer))


def _same(found: list, expected: list[torch.Tensor]) -> bool:
    return all(isinstance(a, torch.Tensor) and a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-7)
               for a, b in zip(found, expected, strict=True))


def _sharding(evidence: Evidence, sizes: list[int]) -> Verdict:
    """What is alive when the function has returned."""
    world, total = evidence.world, sum(sizes)
    for rank, mine in enumerate(evidence.ranks):
        found = mine.value
        shown = {"rank": rank, "expected": [["slice" if place == r else "" for place in range(world)] for r in range(world)],
                 "actual": [["slice"] * world if e["live"] >= total else ["slice" if place == r else "" for place in range(world)]
                            for r, e in enumerate(evidence.values())], "pictured": "which slices of the gradients are alive on a rank"}
        if found["live"] <= total // world + ROOM:
            continue
        if found["left"] and not evidence.of(rank, "reduce_scatter"):
            words = f"every rank holds the whole gradients, {total} bytes; it needs its slices, {total // world}"
        elif found["left"]:
            words = f"p.grad is still there for {found['left']} parameters; set it to None once the gradient is reduced"
        elif any(storage > size // world + ROOM for storage, size in zip(found["storages"], sizes, strict=False)):
            words = "a slice is a view of the whole gradient and keeps all of its memory; give the slice memory of its own"
        else:
            words = f"{found['live']} bytes are alive on rank {rank} afterwards; its slices have {total // world}"
        return fails("sharding", words, **shown)
    return passes("sharding", f"afterwards a rank holds its slices, {total // world} bytes of {total}")


def _lifetime(case: Case, evidence: Evidence, sizes: list[int]) -> Verdict:
    """The peak: slices, two whole gradients, one more slice on its way, and the activations' gradients."""
    largest = max(sizes)
    most = sum(sizes) // case.world + 2 * largest + largest // case.world + 8 * BATCH * case.known["widest"] * 4
    for rank, mine in enumerate(evidence.ranks):
        if mine.value["peak"] > most:
            one = len(evidence.of(rank, "reduce_scatter", "all_reduce")) == 1
            why = ("there is one reduction for all gradients, so every whole gradient waited for it" if one else
                   "all whole gradients were alive at once: reduce and free each one in a hook, while backward is under way"
                   if mine.value["peak"] > 0.9 * sum(sizes) else "whole gradients stay alive too long")
            return fails("lifetime", f"{why} ({mine.value['peak']} bytes at the worst moment; {most} are enough)", rank=rank)
    return passes("lifetime", f"never more than {most} bytes at once: the slices and two whole gradients")


def _order(case: Case, evidence: Evidence) -> Verdict:
    """One reduction a parameter, last layer first; fewer are judged where memory is."""
    expected = [layer[0].numel() for layer in case.known["gradients"]][::-1]
    for rank in range(case.world):
        found = [event.numel for event in evidence.of(rank) if event.kind != "barrier"]
        if len(found) == LAYERS and found != expected:
            return fails("order", "the gradients are not reduced from the last layer to the first; reduce each as soon as it is made",
                         rank=rank, expected=[list(map(str, expected))] * case.world, actual=[list(map(str, found))] * case.world,
                         pictured="elements of each reduction, in order")
        if len(found) > LAYERS:
            return fails("order", f"rank {rank} calls {len(found)} collectives for {LAYERS} parameters; one for each is enough", rank=rank)
    return passes("order", "the gradients are reduced from the last layer to the first")


def _bytes(evidence: Evidence, sizes: list[int]) -> Verdict:
    most = sum(sizes) * (evidence.world - 1) // evidence.world
    for rank in range(evidence.world):
        if (sent := evidence.sent(rank)) > most:
            why = "; where all-reduce is called, a reduce-scatter would do" if evidence.of(rank, "all_reduce") else ""
            return fails("bytes", f"rank {rank} sends {sent} bytes and needs no more than {most}{why}", rank=rank)
    return passes("bytes", f"no rank sends more than {most} bytes: (N-1)/N of the gradients")


EXERCISE = Exercise(
    id="zero2_backward", notebook="05", title="Backward under ZeRO-2",
    task="Run backward so that each whole gradient becomes slices of the mean, and is freed, before backward comes to the next layer. "
         "Return this rank's slices as flat tensors, in the order of params; afterwards every p.grad is None.",
    signature="def zero2_backward(loss, params, rank, world):",
    points={"values": 2, "sharding": 2, "lifetime": 2, "order": 1, "bytes": 2, "no hang": 1},
    hints=("When is the gradient of the last layer complete, and how much of backward is still to come then?",
           "register_post_accumulate_grad_hook(f) calls f(p) as soon as p.grad is complete. In f: reduce-scatter p.grad into a slice, then "
           "p.grad = None.",
           "A dictionary from parameter to slice, filled by the hook: dist.reduce_scatter_tensor(slice, flat gradient, "
           "op=dist.ReduceOp.AVG). After backward read it in the order of params."),
    cases=cases, judge=judge)
