"""all whole gradients were alive at once"""

import torch
import torch.distributed as dist


def zero2_backward(loss, params, rank, world):
    loss.backward()
    found = []
    for param in reversed(params):
        mine = torch.empty(param.numel() // world)
        dist.reduce_scatter_tensor(mine, param.grad.reshape(-1), op=dist.ReduceOp.AVG)
        param.grad = None
        found.insert(0, mine)
    return found
