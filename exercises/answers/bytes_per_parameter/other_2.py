"""Sizes from torch's dtypes, one branch a question."""

import torch


def bytes_per_parameter(precision, optimizer, stage, world):
    computed = torch.float32 if precision == "fp32" else torch.bfloat16
    updated = torch.bfloat16 if precision == "bf16" else torch.float32
    result = dict.fromkeys(("weights", "gradients"), computed.itemsize)
    result["optimizer"] = 0
    if optimizer != "sgd":
        result["optimizer"] += updated.itemsize
    if optimizer == "adam":
        result["optimizer"] += updated.itemsize
    if computed != updated:
        result["optimizer"] += updated.itemsize
    if stage != "ddp":
        result["optimizer"] /= world
    if stage in ("zero2", "zero3"):
        result["gradients"] /= world
    if stage == "zero3":
        result["weights"] /= world
    return result
