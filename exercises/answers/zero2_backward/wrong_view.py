"""a view of the whole gradient"""

import torch.distributed as dist


def zero2_backward(loss, params, rank, world):
    slices = {}

    def hook(param):
        dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)
        n = param.numel() // world
        slices[param] = param.grad.reshape(-1)[rank * n:(rank + 1) * n]
        param.grad = None

    hooks = [param.register_post_accumulate_grad_hook(hook) for param in params]
    loss.backward()
    for each in hooks:
        each.remove()
    return [slices[param] for param in params]
