"""A stack of units for the exercises on FSDP's forward and backward: layers whose weights are one flat tensor, empty at rest.

It runs on the ranks, around the student's hooks, and only writes down what it sees: which collectives ran, which bytes were alive, what was
computed. It must never know a verdict, nor hold the numbers that are expected.

[Note: what is alive] Everything that exists before the student's code runs is frozen out of the garbage collector's lists; what a scan of
those lists finds afterwards was made by the student (or is named in `besides`). A storage is counted once, with the bytes it has now.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

ELEMENT = 4                                  # bytes of a float32


class Unit:
    """What the student is given: see the statement of `fsdp_forward`."""

    def __init__(self, name: str, inside: int, outside: int, weights: torch.Tensor, rank: int, world: int) -> None:
        rows = -(-weights.numel() // world)
        padded = torch.zeros(rows * world)
        padded[: weights.numel()] = weights
        self.name, self.rank, self.world = name, rank, world
        self.shard = padded[rank * rows:][:rows].clone()
        self.full = torch.zeros(rows * world)
        self.module = nn.Linear(inside, outside, device="meta")
        cut = inside * outside
        self.module.weight = nn.Parameter(self.full.data[:cut].view(outside, inside))          # .data: a version counter of its own
        self.module.bias = nn.Parameter(self.full.data[cut:cut + outside])
        self.full.untyped_storage().resize_(0)
        self.grad_shard: torch.Tensor | None = None

    @property
    def is_whole(self) -> bool:
        """Whether forward or backward could read the parameters now."""
        return all(each.untyped_storage().nbytes() >= (each.storage_offset() + each.numel()) * ELEMENT and each.numel()
                   for each in (self.module.weight, self.module.bias))


def weights_of(case: dict) -> list[torch.Tensor]:
    """The flat parameters of each unit, from the case's seed: weight by rows, then bias."""
    random = torch.Generator().manual_seed(case["seed"])
    return [torch.randn(inside * outside + outside, generator=random) / inside**0.5 for inside, outside in case["layers"]]


def inputs_of(case: dict, rank: int, step: int) -> torch.Tensor:
    """The batch of one rank and step."""
    random = torch.Generator().manual_seed(case["seed"] + 1000 * (rank + 1) + step)
    return torch.randn(case["batch"], case["layers"][0][0], generator=random)


def layer(flat: torch.Tensor, inside: int, outside: int, x: torch.Tensor) -> torch.Tensor:
    """What a unit computes, from its flat parameter."""
    return torch.tanh(torch.nn.functional.linear(x, flat[: inside * outside].view(outside, inside), flat[inside * outside:][:outside]))


def make_units(case: dict, rank: int, world: int) -> list[Unit]:
    """The units of this rank, at rest."""
    return [Unit(f"unit {index}", inside, outside, flat, rank, world)
            for index, ((inside, outside), flat) in enumerate(zip(case["layers"], weights_of(case), strict=True))]


class Watch:
    """The log of one rank: gathers, reductions, and bytes alive at named points."""

    def __init__(self, units: list[Unit]) -> None:
        self.units, self.log, self.point = units, [], "at the start"
        self.storages = {unit.name: unit.full.untyped_storage() for unit in units}
        most = max(unit.full.numel() for unit in units)
        self.buffers = [torch.empty(most), torch.empty(most)]        # a message on its way keeps its tensors alive: they must be known
        self.outputs: list[torch.Tensor] = []
        gc.collect()
        gc.freeze()

    def alive(self, besides: Iterable[torch.Tensor] = ()) -> dict[str, int]:
        """Bytes of units that are whole, and of other tensors that were made since. [Note: what is alive]"""
        known = {storage._cdata for storage in self.storages.values()}
        known |= {tensor.untyped_storage()._cdata for tensor in (*besides, *self.buffers, *self.outputs)}
        found = {}
        for each in gc.get_objects():
            if issubclass(type(each), torch.Tensor):
                storage = each.untyped_storage()
                found[storage._cdata] = storage.nbytes()
        whole = [storage.nbytes() for storage in self.storages.values()]
        return {"units": sum(whole), "other": sum(size for place, size in found.items() if place not in known),
                "whole": sum(size > 0 for size in whole),
                "replaced": any(unit.full.untyped_storage()._cdata != self.storages[unit.name]._cdata for unit in self.units)}

    def look(self, point: str, besides: Iterable[torch.Tensor] = ()) -> None:
        """Write down what is alive at `point`."""
        self.point = point
        self.log.append({"what": "alive", "point": point, **self.alive(besides)})

    def fill(self, unit: Unit) -> None:
        """Gather a unit's weights without a line in the log: what the harness does itself."""
        self.all_gather(unit.full, unit.shard)
        self.log.pop()

    def all_gather(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        """Everyone's `mine`, in rank order, in `out`."""
        self._sent("all-gather", out, mine)
        arriving, leaving = self.buffers[0][: out.numel()], self.buffers[1][: mine.numel()]
        leaving.copy_(mine.detach())
        dist.all_gather(list(arriving.chunk(dist.get_world_size())), leaving)
        out.data.copy_(arriving)

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor) -> None:
        """This rank's slice of the sum of everyone's `full`, in `out`."""
        self._sent("reduce-scatter", full, out)
        total = self.buffers[0][: full.numel()]
        total.copy_(full.detach())
        dist.all_reduce(total)
        out.data.copy_(total.view(dist.get_world_size(), -1)[dist.get_rank()])

    def _sent(self, what: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        world = dist.get_world_size()
        if whole.dim() != 1 or part.dim() != 1 or whole.numel() != world * part.numel():
            raise ValueError(f"{what} takes a 1-D tensor of {world} x n elements and one of n; these have the shapes "
                             f"{tuple(whole.shape)} and {tuple(part.shape)}")
        if whole.untyped_storage().nbytes() < whole.numel() * ELEMENT:
            raise ValueError(f"{what} needs a tensor with memory; its storage has {whole.untyped_storage().nbytes()} bytes (resize it first)")
        self.log.append({"what": what, "point": self.point, "elements": whole.numel(), "bytes": whole.numel() * whole.element_size()})
