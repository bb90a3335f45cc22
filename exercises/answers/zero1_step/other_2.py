"""Correct: its own momentum, asynchronous collectives, the gradient divided before it is summed."""

import torch
import torch.distributed as dist


def momentum_step(param, grad, state, lr):
    if "v" not in state:
        state["v"] = torch.zeros_like(param)
    state["v"].mul_(0.9).add_(grad)
    param.sub_(lr * state["v"])


def zero1_step(flat, grad, state, rank, world, lr):
    size = len(flat) // world
    begin = rank * size
    part = grad.new_empty(size)
    dist.reduce_scatter_tensor(part, grad / world, async_op=True).wait()
    velocity = 0.9 * state["velocity"] + part if "velocity" in state else part
    state["velocity"] = velocity
    work = dist.all_gather_into_tensor(flat, flat[begin:begin + size] - lr * velocity, async_op=True)
    work.wait()
