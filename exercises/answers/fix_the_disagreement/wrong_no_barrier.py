"""no barrier was called"""


def fix_the_disagreement(losses, rank, world, dist):
    best, means, saves = float("inf"), [], []
    for step, loss in enumerate(losses):
        dist.all_reduce(loss)
        mean = loss.item() / world
        if mean < best:
            best = mean
            saves.append(step)
        means.append(mean)
    return "B", means, saves
