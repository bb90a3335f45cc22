"""Rank 0 decides, from the mean, and broadcasts the decision."""

import torch


def fix_the_disagreement(losses, rank, world, dist):
    best, means, saves = torch.tensor([float("inf")]), [], []
    for step in range(len(losses)):
        mean = losses[step].clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        new = torch.tensor([1 if rank == 0 and mean < best else 0])
        dist.broadcast(new, src=0)
        if new.item():
            best = mean
            dist.barrier()
            saves += [step]
        means += [float(mean)]
    return ["B", means, saves]
