"""at collective number 3: rank 0 calls barrier"""


def fix_the_disagreement(losses, rank, world, dist):
    best, means, saves = float("inf"), [], []
    for step, loss in enumerate(losses):
        if loss.item() < best:
            best = loss.item()
            saves.append(step)
            dist.barrier()
        dist.all_reduce(loss)
        means.append(loss.item() / world)
    return "B", means, saves
