"""storage is never freed"""


def fsdp_forward(unit, all_gather):
    def before():
        unit.full.untyped_storage().resize_(unit.full.numel() * unit.full.element_size())
        all_gather(unit.full, unit.shard)

    def after():
        pass

    return before, after
