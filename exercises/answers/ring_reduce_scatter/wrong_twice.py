"""twice"""


def ring_reduce_scatter(mine, rank, world, send, recv):
    chunks = mine.reshape(world, -1)
    total = chunks[(rank - 1) % world]
    for step in range(world - 1):
        send(total, (rank + 1) % world)
        total = recv((rank - 1) % world) + chunks[(rank - step - 2) % world]
    return total + chunks[rank]
