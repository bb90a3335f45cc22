"""return chunk rank alone"""


def ring_reduce_scatter(mine, rank, world, send, recv):
    total, travelling = mine.clone(), mine
    for _ in range(world - 1):
        send(travelling, (rank + 1) % world)
        travelling = recv((rank - 1) % world)
        total += travelling
    return total
