"""dropping a reference frees nothing"""

import torch


def fsdp_forward(unit, all_gather):
    def before():
        size = unit.world * unit.shard.numel()
        if unit.full.numel() == 0:
            unit.full = torch.empty(size)
        unit.full.untyped_storage().resize_(4 * size)
        all_gather(unit.full, unit.shard)

    def after():
        unit.full = torch.empty(0)

    return before, after
