"""What exercises about averaging gradients share: are the tensors on every rank those of the mean, and if not, which mistake are they?

Pure functions; this module must never run anything.
"""

from __future__ import annotations

import torch

from .observe import Evidence
from .report import Verdict, fails, passes
from .words import bound, difference


def judge_gradients(evidence: Evidence, expected: list[torch.Tensor], local: list[list[torch.Tensor]],
                    mistakes: dict[str, list[list[torch.Tensor]]] | None = None) -> Verdict:
    """The verdict on "values": every rank must hold `expected`.

    Args:
        local: [rank][parameter] -> what each rank began with.
        mistakes: description -> [rank][parameter] -> what a typical mistake gives.
    """
    world = len(local)
    for rank, result in enumerate(evidence.values("grads")):
        if not isinstance(result, list) or len(result) != len(expected):
            return fails("values", f"rank {rank}: the list of gradients has changed; change the tensors in place", rank=rank)
        if all(isinstance(each, torch.Tensor) and torch.equal(each, mine) for each, mine in zip(result, local[rank], strict=True)) and any(
                not torch.equal(mine, want) for mine, want in zip(local[rank], expected, strict=True)):
            return fails("values", f"no gradient of rank {rank} has changed; write the result into the tensors of the list", rank=rank)
        for index, (mine, want) in enumerate(zip(result, expected, strict=True)):
            unlike = {told: each[rank][index] for told, each in (mistakes or {}).items()}
            scale = max(float(each[index].abs().max()) for each in local)
            tolerance = max(bound(want, world + 2), 4 * (world + 2) * torch.finfo(want.dtype).eps * scale)
            found = difference(mine, want, what=f"rank {rank}'s gradient {index}", tolerance=tolerance, world=world,
                               unlike=unlike | {"the un-reduced local gradient": local[rank][index]})
            if found:
                return fails("values", found.words, rank=rank, parameter=str(index))
    return passes("values", "every rank holds the mean gradient of every parameter")


def most_bytes(evidence: Evidence, most: int, why: str) -> Verdict:
    """The verdict on "bytes": no rank sends more than `most`."""
    for rank in range(evidence.world):
        sent = evidence.sent(rank)
        if sent > most:
            kinds = ", ".join(dict.fromkeys(kind.replace("_", "-") for kind in evidence.kinds(rank)))
            return fails("bytes", f"rank {rank} sends {sent} bytes ({kinds}) and needs no more than {most}: {why}", rank=rank)
    return passes("bytes", "no rank sends more than it must")
