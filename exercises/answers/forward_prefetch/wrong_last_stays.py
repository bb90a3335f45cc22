"""is still whole after forward"""


def forward_prefetch(units, x, gather, compute, free):
    coming = gather(units[0])
    for unit, following in zip(units, units[1:], strict=False):
        coming.wait()
        coming = gather(following)
        x = compute(unit, x)
        free(unit)
    coming.wait()
    return compute(units[-1], x)
