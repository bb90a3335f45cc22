"""free each unit before the gather after the next"""


def forward_prefetch(units, x, gather, compute, free):
    coming = gather(units[0])
    for index, unit in enumerate(units):
        coming.wait()
        if index + 1 < len(units):
            coming = gather(units[index + 1])
        if index:
            free(units[index - 1])
        x = compute(unit, x)
    free(units[-1])
    return x
