"""nothing was added to its own part"""


def ring_reduce_scatter(mine, rank, world, send, recv):
    chunks = mine.reshape(world, -1)
    total = chunks[rank]
    for step in range(world - 2):
        send(total, (rank + 1) % world)
        total = recv((rank - 1) % world) + chunks[(rank - step - 1) % world]
    return total
