"""rank 2 returned already"""

import math

import torch


def clip_grad_norm(shards, real, max_norm, norm_type, all_reduce):
    if not any(real):
        return 0.0                              # nothing to clip here
    mine = torch.cat([shard[:count] for shard, count in zip(shards, real, strict=True)])
    total = torch.linalg.vector_norm(mine, norm_type)
    if math.isinf(norm_type):
        all_reduce(total, "max")
    else:
        total = total**norm_type
        all_reduce(total, "sum")
        total = total ** (1 / norm_type)
    for shard in shards:
        shard.mul_(min(1.0, max_norm / (float(total) + 1e-6)))
    return total
