"""in a ring every rank sends to one neighbour"""


def ring_reduce_scatter(mine, rank, world, send, recv):
    chunks = mine.reshape(world, -1)
    for other in range(world):
        if other != rank:
            send(chunks[other], other)
    total = chunks[rank].clone()
    for other in range(world):
        if other != rank:
            total += recv(other)
    return total
