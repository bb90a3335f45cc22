"""The stack of layers behind `fsdp_forward` and `fsdp_backward`: cases, and what whole weights compute. Only the judge's side knows these.

Pure functions; it must never be imported by a harness.
"""

from __future__ import annotations

import random

import torch

from .exercise import Case

CHANGE = 0.25                                # what the "optimizer" of `fsdp_forward` adds to every element
Layers = list[tuple[int, int]]


def case_of(world: int, layers: Layers, batch: int, steps: int, seed: int) -> Case:
    """A stack of layers, its flat weights cut over the ranks, and a batch for every rank and step."""
    make = torch.Generator().manual_seed(seed)
    flats = [torch.randn(inside * outside + outside, generator=make) / inside**0.5 for inside, outside in layers]
    inputs = [[torch.randn(batch, layers[0][0], generator=make) for _ in range(steps)] for _ in range(world)]
    each = [{"shards": [shard_of(flat, rank, world) for flat in flats], "inputs": inputs[rank]} for rank in range(world)]
    return Case(world, f"{world} ranks, layers of {', '.join(f'{i} to {o}' for i, o in layers)}",
                shared={"layers": [list(each) for each in layers], "change": CHANGE}, each=each,
                known={"flats": flats, "inputs": inputs, "layers": layers, "steps": steps})


def drawn_layers(draw: random.Random, count: int) -> Layers:
    """Sizes of a few layers that follow each other, none of which divides evenly by luck alone."""
    sizes = [draw.randint(3, 9) for _ in range(count + 1)]
    return list(zip(sizes[:-1], sizes[1:], strict=True))


def shard_of(flat: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """This rank's slice, zeros where it is padding."""
    rows = -(-flat.numel() // world)
    padded = torch.zeros(rows * world)
    padded[: flat.numel()] = flat
    return padded[rank * rows:][:rows].clone()


def layer(flat: torch.Tensor, inside: int, outside: int, x: torch.Tensor) -> torch.Tensor:
    """What a unit computes, from its flat parameter."""
    return torch.tanh(torch.nn.functional.linear(x, flat[: inside * outside].view(outside, inside), flat[inside * outside:][:outside]))


def padded_bytes(case: Case) -> list[int]:
    """Bytes of each unit's `full`, padding included."""
    return [4 * case.world * -(-flat.numel() // case.world) for flat in case.known["flats"]]


def names(case: Case) -> list[str]:
    """What the units are called."""
    return [f"unit {index}" for index in range(len(case.known["flats"]))]
