"""still alive after nobody holds it"""

import torch.distributed as dist


def shard_and_pad(weight, rank, world):
    rows, others = weight.shape[0], weight.shape[1:]
    each = -(-rows // world)
    shard = weight.new_zeros(each, *others)
    mine = weight[rank * each:(rank + 1) * each]
    shard[:len(mine)] = mine
    cache = []

    def unshard():
        if not cache:
            padded = shard.new_empty(world * each, *others)
            dist.all_gather_into_tensor(padded, shard)
            cache.append(padded[:rows])
        return cache[0]

    return shard, unshard
