"""the list of its own losses"""


def fix_the_disagreement(losses, rank, world, dist):
    means = [loss.item() for loss in losses]
    saves = [step for step in range(len(means)) if step == 0 or means[step] < min(means[:step])]
    return "B", means, saves
