"""a few bytes a step are enough"""

import torch


def fix_the_disagreement(losses, rank, world, dist):
    history = torch.zeros(world, 64)
    means, saves = [], []
    for step, loss in enumerate(losses):
        mine = torch.zeros(64)
        mine[0] = loss
        dist.all_gather_into_tensor(history, mine)
        mean = history[:, 0].mean().item()
        if not means or mean < min(means):
            saves.append(step)
            dist.barrier()
        means.append(mean)
    return "B", means, saves
