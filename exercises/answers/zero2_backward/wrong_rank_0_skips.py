"""returned already"""

import torch
import torch.distributed as dist


def zero2_backward(loss, params, rank, world):
    slices = {}

    def hook(param):
        slices[param] = torch.empty(param.numel() // world)
        if rank > 0 or param is not params[0]:
            dist.reduce_scatter_tensor(slices[param], param.grad.reshape(-1), op=dist.ReduceOp.AVG)
        param.grad = None

    hooks = [param.register_post_accumulate_grad_hook(hook) for param in params]
    loss.backward()
    for each in hooks:
        each.remove()
    return [slices[param] for param in params]
