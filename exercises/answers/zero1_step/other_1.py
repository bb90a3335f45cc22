"""Correct: lists of chunks, the sum divided afterwards."""

import torch
import torch.distributed as dist


def momentum_step(param, grad, state, lr):
    if "v" not in state:
        state["v"] = torch.zeros_like(param)
    state["v"].mul_(0.9).add_(grad)
    param.sub_(lr * state["v"])


def zero1_step(flat, grad, state, rank, world, lr):
    chunks = list(flat.chunk(world))
    received = torch.zeros_like(chunks[rank])
    dist.reduce_scatter(received, list(grad.chunk(world)), op=dist.ReduceOp.SUM)
    received /= world
    momentum_step(chunks[rank], received, state, lr)
    dist.all_gather(chunks, chunks[rank].clone())
