"""4 barriers were called in 4 steps"""


def fix_the_disagreement(losses, rank, world, dist):
    best, means, saves = float("inf"), [], []
    for step, loss in enumerate(losses):
        dist.all_reduce(loss)
        mean = loss.item() / world
        dist.barrier()
        if mean < best:
            best = mean
            saves.append(step)
        means.append(mean)
    return "B", means, saves
