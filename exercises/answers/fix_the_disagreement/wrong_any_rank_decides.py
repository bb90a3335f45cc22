"""as soon as any rank's loss is the lowest so far"""

import torch


def fix_the_disagreement(losses, rank, world, dist):
    best, means, saves = float("inf"), [], []
    for step, loss in enumerate(losses):
        new = torch.tensor([1.0 if loss.item() < best else 0.0])
        dist.all_reduce(new, op=dist.ReduceOp.MAX)
        if new.item():
            saves.append(step)
            dist.barrier()
        best = min(best, loss.item())
        dist.all_reduce(loss)
        means.append(loss.item() / world)
    return "B", means, saves
