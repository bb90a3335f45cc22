"""is missing in chunk"""


def ring_reduce_scatter(mine, rank, world, send, recv):
    chunks = mine.reshape(world, -1)
    total = chunks[rank].clone()
    for step in range(world - 1):
        send(chunks[(rank - step - 1) % world], (rank + 1) % world)
        came = recv((rank - 1) % world)
        if step == world - 2:
            total += came
    return total
