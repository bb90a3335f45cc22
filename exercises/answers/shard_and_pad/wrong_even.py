"""as evenly as it goes"""

import torch.distributed as dist


def shard_and_pad(weight, rank, world):
    rows, others = weight.shape[0], weight.shape[1:]
    each = -(-rows // world)
    base, more = divmod(rows, world)
    begin = rank * base + min(rank, more)
    mine = weight[begin:begin + base + (rank < more)]
    shard = weight.new_zeros(each, *others)
    shard[:len(mine)] = mine

    def unshard():
        padded = shard.new_empty(world * shard.shape[0], *others)
        dist.all_gather_into_tensor(padded, shard)
        return padded[:rows]

    return shard, unshard
