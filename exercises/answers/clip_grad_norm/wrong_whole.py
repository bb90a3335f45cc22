"""gradients need not travel to know their norm"""

import torch
import torch.distributed as dist


def clip_grad_norm(shards, real, max_norm, norm_type, all_reduce):
    kept = [shard.clone() for shard in shards]
    for shard, count in zip(kept, real, strict=True):
        shard[count:] = 0
    flat = torch.cat(kept)
    everyone = torch.zeros(dist.get_world_size() * flat.numel())
    everyone[dist.get_rank() * flat.numel():][:flat.numel()] = flat
    all_reduce(everyone, "sum")
    total = torch.linalg.vector_norm(everyone, norm_type)
    for shard in shards:
        shard.mul_(min(1.0, max_norm / (float(total) + 1e-6)))
    return total
