"""The exercise `ring_all_gather` (notebook 01): all-gather from send and receive, each message to the next rank."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from .exercise import Case, Exercise
from .observe import Evidence, short, tensor_like
from .pieces import bytes_round_the_ring, owners, round_the_ring
from .report import Verdict, fails, passes


def cases(seed: int) -> Iterator[Case]:
    """Two known cases, then drawn ones: 2 to 4 ranks, other sizes and dtypes."""
    draw = random.Random(seed)
    make = torch.Generator().manual_seed(seed)
    known = [(2, 3, torch.float32), (3, 4, torch.float32)]
    drawn = [(4, draw.randint(5, 40), torch.float32), (3, draw.randint(2, 9), torch.int64), (4, 1, torch.bfloat16)]
    for world, size, dtype in known + drawn:
        pieces = [(torch.rand(size, generator=make) * 200 - 100).to(dtype) + 1 for _ in range(world)]
        yield Case(world, f"{world} ranks, pieces of {size} {short(dtype)}", each=[{"mine": piece} for piece in pieces],
                   known={"pieces": pieces})


def judge(case: Case, evidence: Evidence) -> list[Verdict]:
    """Values, messages round the ring, bytes."""
    pieces = case.known["pieces"]
    verdict, size = _values(pieces, evidence.values("result")), pieces[0].numel() * pieces[0].element_size()
    return [verdict] if not verdict.passed else [verdict, round_the_ring(evidence), bytes_round_the_ring(evidence, size, "piece")]


def _values(pieces: list[torch.Tensor], results: list) -> Verdict:
    world, whole = len(pieces), torch.cat(pieces)
    held = [owners(result, pieces) for result in results]
    shown = {"expected": [[f"rank {rank}" for rank in range(world)]] * world, "actual": held, "pictured": "whose piece lies where"}
    for rank, result in enumerate(results):
        if wrong := tensor_like(result, whole.shape, whole.dtype):
            return fails("values", f"rank {rank}: {wrong}", rank=rank, **shown)
    for rank, found in enumerate(held):
        places = [place for place in range(world) if found[place] != f"rank {place}"]
        if places:
            return fails("values", f"rank {rank}: {_mistake(rank, found, places)}", rank=rank, **shown)
    return passes("values", "every rank holds every piece, in rank order", **shown)


def _mistake(rank: int, found: list[str], places: list[int]) -> str:
    """What the places of wrong pieces tell."""
    world = len(found)
    names = [f"rank {other}" for other in range(world)]
    if sorted(found) == sorted(names):
        return "all pieces are there, but in the order of their arrival; place a piece by the rank it comes from"
    if all(found[place] == "zeros" for place in places):
        count = "one piece" if len(places) == 1 else f"{len(places)} pieces"
        return f"{count} never arrived (place {places[0]} holds zeros); {world} ranks need {world - 1} steps"
    neighbours = {f"rank {(rank + step) % world}" for step in (1, -1)}
    if {found[place] for place in places} <= neighbours and world > 2:
        return (f"place {places[0]} holds {found[places[0]]}'s piece once more; from the second step on, pass on the piece that has just "
                "come, not your own")
    return f"place {places[0]} holds {_of(found[places[0]])} and must hold rank {places[0]}'s piece"


def _of(name: str) -> str:
    return {"?": "something that is no rank's piece", "zeros": "zeros"}.get(name, f"{name}'s piece")


EXERCISE = Exercise(
    id="ring_all_gather", notebook="01", title="All-gather round a ring",
    task="Every rank holds one piece (a 1-D tensor, equally long everywhere). Return, on every rank, all pieces in rank order as one "
         "tensor. send(tensor, to) hands a tensor over and does not wait; recv(source) waits for the next tensor from that rank and "
         "returns it. Send one piece a step, and only to the next rank.",
    signature="def ring_all_gather(mine, rank, world, send, recv):",
    points={"values": 2, "no hang": 1, "order": 1, "bytes": 1},
    hints=("Draw four ranks in a circle. In the first step each sends its own piece to the right. What does each hold then that its right "
           "neighbour still lacks?",
           "In step s pass on the piece that came in step s - 1. After world - 1 steps every piece has been everywhere.",
           "Make room for world pieces. The piece that comes in step s (from 0) on rank r began on rank (r - s - 1) % world: put it there, "
           "and send it on in the next step. Send before you receive."),
    cases=cases, judge=judge)
