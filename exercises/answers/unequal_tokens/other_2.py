"""Counts gathered first, then asynchronous averages that are scaled afterwards."""

import torch


def unequal_tokens(grads, tokens, rank, world, dist):
    counts = torch.zeros(world, dtype=torch.int64)
    dist.all_gather_into_tensor(counts, torch.tensor([tokens]))
    works = []
    for grad in grads:
        grad.mul_(tokens)
        works.append(dist.all_reduce(grad, op=dist.ReduceOp.AVG, async_op=True))
    for grad, work in zip(grads, works, strict=True):
        work.wait()
        grad.mul_(world).div_(counts.sum())
