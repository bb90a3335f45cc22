"""the powers were averaged over the ranks, not summed"""

import math

import torch


def clip_grad_norm(shards, real, max_norm, norm_type, all_reduce):
    mine = [shard[:count].abs() for shard, count in zip(shards, real, strict=True)]
    if math.isinf(norm_type):
        total = torch.tensor(max([float(piece.max()) for piece in mine if piece.numel()], default=0.0))
        all_reduce(total, "max")
    else:
        total = torch.tensor(sum(float((piece**norm_type).sum()) for piece in mine))
        all_reduce(total, "sum")
        total /= torch.distributed.get_world_size()
        total = total ** (1 / norm_type)
    factor = min(1.0, max_norm / (float(total) + 1e-6))
    for shard in shards:
        shard.mul_(factor)
    return total
