"""Correct: torch.chunk, then a row of zeros at a time."""

import torch
import torch.distributed as dist


def shard_and_pad(weight, rank, world):
    chunks = torch.chunk(weight, world)
    each, shape = chunks[0].shape[0], weight.shape
    shard = chunks[rank].clone() if rank < len(chunks) else weight[:0].clone()
    while shard.shape[0] < each:
        shard = torch.cat([shard, torch.zeros_like(weight[:1])])
    del chunks, weight

    def unshard():
        parts = [torch.empty_like(shard) for _ in range(world)]
        dist.all_gather(parts, shard)
        return torch.cat(parts)[:shape[0]]

    return shard, unshard
