"""A stack of units for the harnesses of FSDP's forward and backward: layers whose weights are one flat tensor, empty at rest.

[Note: what is alive] Tensors of the harness (shards, inputs, outputs) are known by name and taken off the meter's figure; what is left was
made by the answer. A storage counts once, with the bytes it has now.
"""

from __future__ import annotations

import torch
from torch import nn

ELEMENT = 4                                  # bytes of a float32


class Linear(nn.Module):
    """nn.Linear on views of one flat tensor: weight by rows, then bias."""

    def __init__(self, flat: torch.Tensor, inside: int, outside: int) -> None:
        super().__init__()
        cut = inside * outside
        self.weight = nn.Parameter(flat[:cut].view(outside, inside))
        self.bias = nn.Parameter(flat[cut:cut + outside])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, inside) -> (batch, outside)"""
        return nn.functional.linear(x, self.weight, self.bias)


class Unit:
    """What the learner is given: name, rank, world, shard, full, module, grad_shard; see the statement of `fsdp_forward`."""

    def __init__(self, name: str, inside: int, outside: int, shard: torch.Tensor, rank: int, world: int) -> None:
        self.name, self.rank, self.world, self.shard = name, rank, world, shard
        self.full = torch.zeros(shard.numel() * world)
        self.module = Linear(self.full.data, inside, outside)                      # .data: a version counter of its own
        self.full.untyped_storage().resize_(0)
        self.grad_shard: torch.Tensor | None = None

    @property
    def is_whole(self) -> bool:
        """Whether forward or backward could read the parameters now."""
        return all(each.untyped_storage().nbytes() >= (each.storage_offset() + each.numel()) * ELEMENT and each.numel()
                   for each in (self.module.weight, self.module.bias))


class Watch:
    """What one rank holds at named points, and its two collectives."""

    def __init__(self, case: dict, rank, meter) -> None:
        self.rank, self.meter, self.log = rank, meter, []
        self.units = [Unit(f"unit {index}", inside, outside, shard, rank.rank, rank.world)
                      for index, ((inside, outside), shard) in enumerate(zip(case["layers"], case["shards"], strict=True))]
        self.homes = [unit.full for unit in self.units]
        self.own = [*case["shards"], *case["inputs"]]

    def look(self, point: str, *besides: torch.Tensor) -> dict:
        """Write down what is alive at `point`; `besides` are the harness's own too. [Note: what is alive]"""
        known = [*self.homes, *self.own, *besides]
        self.meter.know(*known)
        sizes = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in known}
        whole = [home.untyped_storage().nbytes() for home in self.homes]
        self.log.append({"point": point, "units": sum(whole), "other": self.meter.live() - sum(sizes.values()),
                         "whole": [unit.name for unit, size in zip(self.units, whole, strict=True) if size],
                         "replaced": any(unit.full is not home for unit, home in zip(self.units, self.homes, strict=True))})
        return self.log[-1]

    def all_gather(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        """Everyone's `mine`, in rank order, in `out`."""
        self._check("all_gather", out, mine)
        self.rank.wire.all_gather_into_tensor(out.data, mine.data)

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor) -> None:
        """This rank's slice of the sum of everyone's `full`, in `out`."""
        self._check("reduce_scatter", full, out)
        self.rank.wire.reduce_scatter_tensor(out.data, full.data)

    def _check(self, what: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        if whole.dim() != 1 or part.dim() != 1 or whole.numel() != self.rank.world * part.numel():
            raise ValueError(f"{what} takes a 1-D tensor of {self.rank.world} x n elements and one of n; these have the shapes "
                             f"{tuple(whole.shape)} and {tuple(part.shape)}")
        if whole.untyped_storage().nbytes() < whole.numel() * ELEMENT:
            raise ValueError(f"{what} needs a tensor with memory; its storage has {whole.untyped_storage().nbytes()} bytes (resize it "
                             "first)")


def pair_of(returned: object) -> tuple:
    """The two functions that the learner returned."""
    if not isinstance(returned, tuple | list) or len(returned) != 2 or not all(map(callable, returned)):
        raise TypeError("the function must return two functions, (before, after)")
    return tuple(returned)
