"""2 messages (8 bytes) where one all-reduce is enough"""

import math

import torch


def clip_grad_norm(shards, real, max_norm, norm_type, all_reduce):
    norms = []
    for shard, count in zip(shards, real, strict=True):
        if math.isinf(norm_type):
            one = shard[:count].abs().max() if count else torch.tensor(0.0)
            all_reduce(one, "max")
            norms.append(float(one))
        else:
            one = (shard[:count].abs() ** norm_type).sum()
            all_reduce(one, "sum")
            norms.append(float(one) ** (1 / norm_type))
    total = float(torch.linalg.vector_norm(torch.tensor(norms), norm_type))
    for shard in shards:
        shard.mul_(min(1.0, max_norm / (total + 1e-6)))
    return total
