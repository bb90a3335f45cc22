"""rows came out where this rank holds"""

import torch


def reshard_on_load(rows, width, pieces, rank, world, read):
    for file, _, count in pieces:
        if file == f"rank-{rank}":
            return read(file, 0, count)
    return torch.empty(0, width)
