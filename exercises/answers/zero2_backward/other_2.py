"""Correct: asynchronous reductions, each waited for in the next hook."""

import torch.distributed as dist


class Reducer:
    def __init__(self, world):
        self.world, self.done, self.pending = world, {}, None

    def finish(self):
        if self.pending is not None:
            work, param, mine = self.pending
            work.wait()
            self.done[id(param)] = mine
            self.pending = None

    def __call__(self, param):
        self.finish()
        whole, param.grad = param.grad.view(-1), None
        whole /= self.world
        mine = whole.new_empty(whole.numel() // self.world)
        self.pending = dist.reduce_scatter_tensor(mine, whole, async_op=True), param, mine


def zero2_backward(loss, params, rank, world):
    reducer = Reducer(world)
    hooks = [p.register_post_accumulate_grad_hook(reducer) for p in params]
    loss.backward()
    reducer.finish()
    [hook.remove() for hook in hooks]
    return [reducer.done[id(p)] for p in params]
