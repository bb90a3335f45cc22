"""at collective number 2: rank 0 calls barrier"""


def fix_the_disagreement(losses, rank, world, dist):
    best, means, saves = float("inf"), [], []
    for step, loss in enumerate(losses):
        dist.all_reduce(loss)
        mean = loss.item() / world
        if mean < best:
            best = mean
            saves.append(step)
            if rank == 0:
                dist.barrier()
        means.append(mean)
    return "B", means, saves
