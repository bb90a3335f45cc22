"""return a dict with the keys weights, gradients and optimizer"""


def bytes_per_parameter(precision, optimizer, stage, world):
    return 16 if stage == "ddp" else 16 / world
