"""A table looked up, and a bound on the stage's number."""

SIZE = {"fp32": (4, 4, 0), "mixed": (2, 4, 4), "bf16": (2, 2, 0)}
MOMENTS = {"sgd": 0, "momentum": 1, "adam": 2}
LEVEL = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}


def bytes_per_parameter(precision, optimizer, stage, world):
    weight, moment, master = SIZE[precision]
    level = LEVEL[stage]
    return {"weights": weight / world if level >= 3 else weight,
            "gradients": weight / world if level >= 2 else weight,
            "optimizer": (master + MOMENTS[optimizer] * moment) / (world if level else 1)}
