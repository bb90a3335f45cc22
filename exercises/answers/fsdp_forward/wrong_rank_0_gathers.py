"""nobody can go on: rank 0 waits for all ranks"""


def fsdp_forward(unit, all_gather):
    def before():
        unit.full.untyped_storage().resize_(unit.full.numel() * 4)
        if unit.rank == 0:
            all_gather(unit.full, unit.shard)

    def after():
        unit.full.untyped_storage().resize_(0)

    return before, after
