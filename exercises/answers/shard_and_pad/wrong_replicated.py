"""keeps the whole weight"""



def shard_and_pad(weight, rank, world):
    each = -(-weight.shape[0] // world)
    shard = weight.new_zeros(each, *weight.shape[1:])
    mine = weight[rank * each:(rank + 1) * each]
    shard[:len(mine)] = mine
    return shard, lambda: weight
