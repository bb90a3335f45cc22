"""set the parameters' .grad to None"""

import torch


def fsdp_backward(unit, all_gather, reduce_scatter):
    def before():
        unit.full.untyped_storage().resize_(unit.full.numel() * unit.full.element_size())
        all_gather(unit.full, unit.shard)

    def after():
        whole = torch.zeros(unit.world * unit.shard.numel())
        pieces = [param.grad.flatten() for param in unit.module.parameters()]
        flat = torch.cat(pieces)
        whole[: flat.numel()] = flat
        mine = torch.empty_like(unit.shard)
        reduce_scatter(mine, whole)
        mine /= unit.world
        unit.grad_shard = mine if unit.grad_shard is None else unit.grad_shard + mine
        unit.full.untyped_storage().resize_(0)

    return before, after
