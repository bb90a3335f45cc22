"""elements, not rows"""

import torch.distributed as dist


def shard_and_pad(weight, rank, world):
    flat = weight.reshape(-1)
    each = -(-flat.numel() // world)
    shard = weight.new_zeros(each)
    mine = flat[rank * each:(rank + 1) * each]
    shard[:len(mine)] = mine
    shape = weight.shape

    def unshard():
        padded = shard.new_empty(world * each)
        dist.all_gather_into_tensor(padded, shard)
        return padded[:shape.numel()].reshape(shape)

    return shard, unshard
