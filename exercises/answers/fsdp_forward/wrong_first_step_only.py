"""unit 0 is not gathered in step 1"""

import torch


def fsdp_forward(unit, all_gather):
    kept = []

    def before():
        unit.full.untyped_storage().resize_(unit.full.numel() * 4)
        if kept:
            unit.full.copy_(torch.tensor(kept[0]))
        else:
            all_gather(unit.full, unit.shard)
            kept.append(unit.full.tolist())

    def after():
        unit.full.untyped_storage().resize_(0)

    return before, after
