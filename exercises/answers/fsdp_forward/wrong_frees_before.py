"""unit 0 has no weights when its forward reads them"""


def fsdp_forward(unit, all_gather):
    def before():
        unit.full.untyped_storage().resize_(unit.full.numel() * 4)
        all_gather(unit.full, unit.shard)
        unit.full.untyped_storage().resize_(0)

    return before, lambda: None
