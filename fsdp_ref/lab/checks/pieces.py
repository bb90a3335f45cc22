"""What the exercises about rings share: which rank's piece lies where, and whether messages went round the ring only.

Pure functions of evidence; this module must never draw or run anything.
"""

from __future__ import annotations

import torch

from .observe import Evidence
from .report import Verdict, fails, passes


def owners(result: object, pieces: list[torch.Tensor]) -> list[str]:
    """For each place of a result of `len(pieces)` equal pieces: whose piece lies there, "0" for zeros, "?" for something else."""
    size = pieces[0].numel()
    if not isinstance(result, torch.Tensor) or result.numel() != size * len(pieces):
        return ["?"] * len(pieces)
    return [owner(part, pieces) for part in result.reshape(len(pieces), -1)]


def owner(part: torch.Tensor, pieces: list[torch.Tensor]) -> str:
    """Whose piece this is."""
    same = [rank for rank, piece in enumerate(pieces) if part.dtype == piece.dtype and torch.equal(part, piece.reshape(-1))]
    return f"rank {same[0]}" if same else "zeros" if not bool(part.any()) else "?"


def round_the_ring(evidence: Evidence) -> Verdict:
    """Whether each rank sent to one neighbour only and received from the other only; either direction will do."""
    world = evidence.world
    calls = [[f"{event.kind} {'to' if event.kind == 'send' else 'from'} {event.peer}" for event in evidence.of(rank)]
             for rank in range(world)]
    for step in (1, -1):
        if all(event.peer == ((rank + step) if event.kind == "send" else (rank - step)) % world
               for rank in range(world) for event in evidence.of(rank)):
            return passes("order", "every message went to the next rank of the ring")
    expected = [[f"send to {(rank + 1) % world}", f"recv from {(rank - 1) % world}"] * (world - 1) for rank in range(world)]
    to = {rank: sorted({event.peer for event in evidence.of(rank, "send")}) for rank in range(world)}
    for rank in range(world):
        far = [peer for peer in to[rank] if (peer - rank) % world not in (1, world - 1)]
        if far:
            return fails("order", f"rank {rank} sends to rank {far[0]}, which is not its neighbour; in a ring of {world} it talks to its "
                         "two neighbours only", rank=rank, expected=expected, actual=calls, pictured="messages in order")
    busy = next((rank for rank in range(world) if len(to[rank]) > 1), None)
    rank = busy if busy is not None else next(r for r in range(world) if (to[r] or [0])[0] != (r + 1) % world)
    words = (f"rank {rank} sends to ranks {' and '.join(map(str, to[rank]))}; in a ring every rank sends to one neighbour and receives "
             "from the other" if busy is not None else "the ranks do not send in one direction; all must send to the next rank, or all to "
             "the one before")
    return fails("order", words, rank=rank, expected=expected, actual=calls, pictured="messages in order")


def bytes_round_the_ring(evidence: Evidence, each: int, name: str) -> Verdict:
    """Whether each rank sent `world - 1` parts of `each` bytes, and no more. `name`: what a part is called."""
    world, most = evidence.world, (evidence.world - 1) * each
    for rank in range(world):
        sent, messages = evidence.sent(rank), evidence.of(rank, "send")
        if sent > most:
            large = next((event for event in messages if event.nbytes > each), None)
            why = (f"one message carries {large.nbytes // each} {name}s; send one {name} a step" if large else
                   f"{len(messages)} messages of one {name} each; the last is not needed")
            return fails("bytes", f"rank {rank} sends {sent} bytes and needs no more than {most}: {why}", rank=rank)
    return passes("bytes", f"each rank sends world - 1 {name}s, the least there is")
