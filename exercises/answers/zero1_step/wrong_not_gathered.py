"""only its own slice is new"""

import torch
import torch.distributed as dist


def momentum_step(param, grad, state, lr):
    if "v" not in state:
        state["v"] = torch.zeros_like(param)
    state["v"].mul_(0.9).add_(grad)
    param.sub_(lr * state["v"])


def zero1_step(flat, grad, state, rank, world, lr):
    n = flat.numel() // world
    mine = flat[rank * n:(rank + 1) * n]
    part = torch.empty_like(mine)
    dist.reduce_scatter_tensor(part, grad, op=dist.ReduceOp.AVG)
    momentum_step(mine, part, state, lr)
