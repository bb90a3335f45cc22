"""after its weights were freed"""


def forward_prefetch(units, x, gather, compute, free):
    coming = gather(units[0])
    for index, unit in enumerate(units):
        coming.wait()
        x = compute(unit, x)
        if index + 1 < len(units):
            coming = gather(units[index + 1])
            coming.wait()
            free(units[index + 1])
    return x
