"""lack the fp32 master copy"""


def bytes_per_parameter(precision, optimizer, stage, world):
    weight = 4 if precision == "fp32" else 2
    gradient = weight
    moment = 2 if precision == "bf16" else 4
    master = 0
    count = {"sgd": 0, "momentum": 1, "adam": 2}[optimizer]
    held = {"weights": weight, "gradients": gradient, "optimizer": master + moment * count}
    for part in {"ddp": (), "zero1": ("optimizer",), "zero2": ("optimizer", "gradients"), "zero3": tuple(held)}[stage]:
        held[part] = held[part] / world
    return held
