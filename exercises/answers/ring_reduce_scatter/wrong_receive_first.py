"""nobody can go on: rank 0 waits for a message from rank 1"""


def ring_reduce_scatter(mine, rank, world, send, recv):
    chunks = mine.reshape(world, -1)
    total = chunks[(rank - 1) % world]
    for step in range(world - 1):
        came = recv((rank - 1) % world)
        send(total, (rank + 1) % world)
        total = came + chunks[(rank - step - 2) % world]
    return total
