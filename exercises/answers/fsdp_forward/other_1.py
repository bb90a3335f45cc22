"""A class with two methods; the module's parameters are pointed at a fresh tensor and back at nothing."""

import torch


class Gathered:
    def __init__(self, unit, all_gather):
        self.unit, self.all_gather = unit, all_gather
        self.weight, self.bias = unit.module.weight, unit.module.bias
        self.shapes = [self.weight.shape, self.bias.shape]

    def begin(self):
        whole = torch.empty(self.unit.world * self.unit.shard.numel())
        self.all_gather(whole, self.unit.shard)
        first = self.shapes[0].numel()
        self.weight.data = whole[:first].view(self.shapes[0])
        self.bias.data = whole[first:first + self.shapes[1].numel()]

    def end(self):
        self.weight.data = torch.empty(0)
        self.bias.data = torch.empty(0)


def fsdp_forward(unit, all_gather):
    gathered = Gathered(unit, all_gather)
    return gathered.begin, gathered.end
