"""Collect in the order of arrival, then turn the list round and roll it into place."""

import torch


def neighbours(rank, world):
    return (rank + 1) % world, (rank - 1) % world


def ring_all_gather(mine, rank, world, send, recv):
    to, source = neighbours(rank, world)
    arrived = [mine]
    for _ in range(1, world):
        send(arrived[-1], to)
        arrived += [recv(source)]
    ascending = torch.stack(arrived[::-1])                   # rank + 1, rank + 2, ..., rank
    return torch.roll(ascending, rank + 1, dims=0).flatten()
