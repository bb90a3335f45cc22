"""the gradient was never reduced"""

import torch
import torch.distributed as dist


def momentum_step(param, grad, state, lr):
    if "v" not in state:
        state["v"] = torch.zeros_like(param)
    state["v"].mul_(0.9).add_(grad)
    param.sub_(lr * state["v"])


def zero1_step(flat, grad, state, rank, world, lr):
    n = flat.numel() // world
    mine = flat[rank * n:(rank + 1) * n].clone()
    momentum_step(mine, grad[rank * n:(rank + 1) * n], state, lr)
    dist.all_gather_into_tensor(flat, mine)
