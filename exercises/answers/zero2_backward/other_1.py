"""Correct: a hook a place in the list, the sum divided, the storage of the gradient freed by hand."""

import torch
import torch.distributed as dist


def zero2_backward(loss, params, rank, world):
    found = [None] * len(params)

    def hook_for(place):
        def hook(param):
            mine = torch.zeros(param.numel() // world)
            dist.reduce_scatter(mine, list(param.grad.flatten().chunk(world)))
            found[place] = mine.div_(world)
            param.grad.untyped_storage().resize_(0)
            param.grad = None
        return hook

    handles = [param.register_post_accumulate_grad_hook(hook_for(place)) for place, param in enumerate(params)]
    loss.backward()
    for handle in handles:
        handle.remove()
    return found
