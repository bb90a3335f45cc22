"""Recursion: each call holds the handle of its unit."""


def forward_prefetch(units, x, gather, compute, free):
    def step(handle, rest, x):
        unit, *others = rest
        following = gather(others[0]) if others else None
        handle.wait()
        x = compute(unit, x)
        free(unit)
        return step(following, others, x) if others else x

    return step(gather(units[0]), list(units), x)
