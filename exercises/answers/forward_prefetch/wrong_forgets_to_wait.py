"""before its gather was waited for"""


def forward_prefetch(units, x, gather, compute, free):
    gather(units[0])
    for index, unit in enumerate(units):
        if index + 1 < len(units):
            gather(units[index + 1])
        x = compute(unit, x)
        free(unit)
    return x
