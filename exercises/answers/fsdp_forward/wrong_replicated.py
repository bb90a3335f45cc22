"""all units are whole on every rank, nothing is sharded"""


def fsdp_forward(unit, all_gather):
    unit.full.untyped_storage().resize_(unit.full.numel() * unit.full.element_size())
    all_gather(unit.full, unit.shard)

    def before():
        all_gather(unit.full, unit.shard)

    return before, lambda: None
