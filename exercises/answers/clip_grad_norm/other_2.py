"""Plain Python numbers and a loop; the infinity norm as a case of the same code; scales only when it must."""

import torch


def clip_grad_norm(shards, real, max_norm, norm_type, all_reduce):
    values = [abs(value) for shard, count in zip(shards, real, strict=True) for value in shard[:count].tolist()]
    biggest = norm_type == torch.inf
    message = torch.zeros(1, dtype=torch.float64)
    message[0] = max(values, default=0.0) if biggest else sum(value**norm_type for value in values)
    all_reduce(message, "max" if biggest else "sum")
    norm = message.item() if biggest else message.item() ** (1 / norm_type)
    if norm > max_norm:
        for shard, count in zip(shards, real, strict=True):
            shard[:count] *= max_norm / norm
    return norm
