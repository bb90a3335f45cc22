"""A class; divides before the reduction, into one buffer that both gradients are copied to; adds in place."""

import torch


class Backward:
    def __init__(self, unit, gather, reduce):
        self.unit, self.gather, self.reduce = unit, gather, reduce

    def before(self):
        unit = self.unit
        buffer = torch.empty_like(unit.full, device="cpu")
        self.gather(buffer, unit.shard)
        unit.full.untyped_storage().resize_(buffer.untyped_storage().nbytes())
        unit.full.copy_(buffer)

    def after(self):
        unit = self.unit
        unit.full.untyped_storage().resize_(0)
        buffer = torch.zeros(unit.full.shape)
        weight, bias = unit.module.weight, unit.module.bias
        end = weight.numel() + bias.numel()
        buffer[: weight.numel()].view(weight.shape).copy_(weight.grad)
        buffer[weight.numel():end].copy_(bias.grad)
        weight.grad = bias.grad = None
        buffer.div_(unit.world)
        if unit.grad_shard is None:
            unit.grad_shard = torch.zeros(unit.shard.shape)
        mine = torch.empty(unit.shard.shape)
        self.reduce(mine, buffer)
        unit.grad_shard.add_(mine)


def fsdp_backward(unit, all_gather, reduce_scatter):
    both = Backward(unit, all_gather, reduce_scatter)
    return both.before, both.after
