"""no unit is ever freed"""


def forward_prefetch(units, x, gather, compute, free):
    coming = gather(units[0])
    for index, unit in enumerate(units):
        coming.wait()
        if index + 1 < len(units):
            coming = gather(units[index + 1])
        x = compute(unit, x)
    return x
