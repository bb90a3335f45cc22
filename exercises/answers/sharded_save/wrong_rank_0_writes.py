"""that is what belongs to other ranks"""

import torch
import torch.distributed as dist


def sharded_save(disk, step, shards, rank, world, barrier):
    padded = torch.zeros(2)
    padded[: shards["bias"].numel()] = shards["bias"]
    weights = [torch.empty(3, 4) for _ in range(world)]
    biases = [torch.empty(2) for _ in range(world)]
    dist.all_gather(weights, shards["weight"])
    dist.all_gather(biases, padded)
    if rank == 0:
        partial = f"step-{step:08d}.partial"
        disk.mkdir(partial)
        for other in range(world):
            bias = biases[other] if other < world - 1 else torch.empty(0)
            disk.write(f"{partial}/rank-{other}.safetensors", {"weight": weights[other], "bias": bias})
            disk.sync(f"{partial}/rank-{other}.safetensors")
        disk.rename(partial, f"step-{step:08d}")
    barrier()
