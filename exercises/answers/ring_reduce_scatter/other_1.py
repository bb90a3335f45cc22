"""The other direction, with a dict of chunks and addition in place."""


def ring_reduce_scatter(mine, rank, world, send, recv):
    size = len(mine) // world
    own = {chunk: mine[chunk * size:(chunk + 1) * size].clone() for chunk in range(world)}
    before, after = (rank + world - 1) % world, (rank + 1) % world
    travelling = after
    for _ in range(world - 1):
        send(own[travelling], before)
        travelling = (travelling + 1) % world
        own[travelling] += recv(after)
    return own[travelling]
