"""it was gathered into other memory"""

import torch


def fsdp_backward(unit, all_gather, reduce_scatter):
    def before():
        fresh = torch.empty(unit.world * unit.shard.numel())
        all_gather(fresh, unit.shard)
        cut = unit.module.weight.numel()
        unit.module.weight.data = fresh[:cut].view(unit.module.weight.shape)
        unit.module.bias.data = fresh[cut:cut + unit.module.bias.numel()]

    def after():
        whole = torch.zeros(unit.world * unit.shard.numel())
        pieces = [param.grad.flatten() for param in unit.module.parameters()]
        flat = torch.cat(pieces)
        whole[: flat.numel()] = flat
        mine = torch.empty_like(unit.shard)
        reduce_scatter(mine, whole)
        mine /= unit.world
        unit.grad_shard = mine if unit.grad_shard is None else unit.grad_shard + mine
        for param in unit.module.parameters():
            param.grad = None
        unit.full.untyped_storage().resize_(0)

    return before, after
