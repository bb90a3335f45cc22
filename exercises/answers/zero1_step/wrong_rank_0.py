"""rank 0 holds the whole momentum"""

import torch
import torch.distributed as dist


def momentum_step(param, grad, state, lr):
    if "v" not in state:
        state["v"] = torch.zeros_like(param)
    state["v"].mul_(0.9).add_(grad)
    param.sub_(lr * state["v"])


def zero1_step(flat, grad, state, rank, world, lr):
    dist.reduce(grad, 0, op=dist.ReduceOp.AVG)
    if rank == 0:
        momentum_step(flat, grad, state, lr)
    dist.broadcast(flat, 0)
