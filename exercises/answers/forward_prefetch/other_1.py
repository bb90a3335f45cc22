"""A queue of gathers that is kept two long."""

from collections import deque


def forward_prefetch(units, x, gather, compute, free):
    ahead = deque()
    waiting = iter(units)
    for unit in units:
        while len(ahead) < 2:
            following = next(waiting, None)
            if following is None:
                break
            ahead.append(gather(following))
        ahead.popleft().wait()
        x = compute(unit, x)
        free(unit)
    return x
