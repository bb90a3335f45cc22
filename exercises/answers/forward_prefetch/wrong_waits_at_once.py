"""waited for at once"""


def forward_prefetch(units, x, gather, compute, free):
    gather(units[0]).wait()
    for index, unit in enumerate(units):
        if index + 1 < len(units):
            gather(units[index + 1]).wait()
        x = compute(unit, x)
        free(unit)
    return x
