"""everything is gathered before the first unit computes"""


def forward_prefetch(units, x, gather, compute, free):
    coming = [gather(unit) for unit in units]
    for unit, handle in zip(units, coming, strict=True):
        handle.wait()
        x = compute(unit, x)
        free(unit)
    return x
