"""add up over the parameters before the message"""

import math

import torch


def clip_grad_norm(shards, real, max_norm, norm_type, all_reduce):
    powers = torch.zeros(len(shards))
    for index, (shard, count) in enumerate(zip(shards, real, strict=True)):
        if count:
            values = shard[:count].abs()
            powers[index] = values.max() if math.isinf(norm_type) else (values**norm_type).sum()
    all_reduce(powers, "max" if math.isinf(norm_type) else "sum")
    total = float(powers.max()) if math.isinf(norm_type) else float(powers.sum()) ** (1 / norm_type)
    for shard in shards:
        shard.mul_(min(1.0, max_norm / (total + 1e-6)))
    return total
