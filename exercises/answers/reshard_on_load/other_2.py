"""Lets torch.chunk cut the row numbers, and walks from row to row."""

import torch


def owner(pieces, row):
    return next((file, first, count) for file, first, count in pieces if first <= row < first + count)


def reshard_on_load(rows, width, pieces, rank, world, read):
    cuts = torch.arange(rows).chunk(world)
    if rank >= len(cuts):
        return torch.zeros(0, width)
    row, last = int(cuts[rank][0]), int(cuts[rank][-1])
    parts = []
    while row <= last:
        file, first, count = owner(pieces, row)
        take = min(first + count, last + 1) - row
        parts.append(read(file, row - first, take))
        row += take
    return torch.vstack(parts)
