"""Everybody gathers all losses and takes the mean itself."""

import torch


def fix_the_disagreement(losses, rank, world, dist):
    means, saves = [], []
    for step, loss in enumerate(losses):
        everybody = [torch.empty_like(loss) for _ in range(world)]
        dist.all_gather(everybody, loss)
        mean = sum(each.item() for each in everybody) / world
        if not means or mean < min(means):
            saves.append(step)
            dist.barrier()
        means.append(mean)
    return "B", means, saves
