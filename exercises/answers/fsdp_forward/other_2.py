"""A generator that stops between the two halves; the gather goes through a buffer that is copied and dropped."""

import torch


def life(unit, all_gather):
    while True:
        buffer = torch.empty(unit.shard.numel() * unit.world)
        all_gather(buffer, unit.shard)
        unit.full.untyped_storage().resize_(buffer.untyped_storage().nbytes())
        unit.full.copy_(buffer)
        del buffer
        yield
        unit.full.untyped_storage().resize_(0)
        yield


def fsdp_forward(unit, all_gather):
    steps = life(unit, all_gather)
    return lambda: next(steps), lambda: next(steps)
