"""torch's vector_norm on one concatenation, float64 on the wire, padding cleared first, torch's own clamp."""

import torch


def clip_grad_norm(shards, real, max_norm, norm_type, all_reduce):
    for shard, count in zip(shards, real, strict=True):
        shard[count:] = 0
    flat = torch.cat([shard.reshape(-1).double() for shard in shards])
    norm = torch.linalg.vector_norm(flat, norm_type).reshape(1)
    if norm_type == float("inf"):
        all_reduce(norm, "max")
    else:
        norm.pow_(norm_type)
        all_reduce(norm, "sum")
        norm.pow_(1.0 / norm_type)
    scale = torch.clamp(max_norm / norm, max=1.0).item()
    torch._foreach_mul_(shards, scale)
    return norm.item()
