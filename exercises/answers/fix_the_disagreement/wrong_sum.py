"""is exactly 2.00 times the reference: summed, not averaged"""


def fix_the_disagreement(losses, rank, world, dist):
    best, means, saves = float("inf"), [], []
    for step, loss in enumerate(losses):
        dist.all_reduce(loss)
        if loss.item() < best:
            best = loss.item()
            saves.append(step)
            dist.barrier()
        means.append(loss.item())
    return "B", means, saves
