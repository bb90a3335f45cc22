"""one piece never arrived"""

import torch


def ring_all_gather(mine, rank, world, send, recv):
    whole = torch.zeros(world, len(mine), dtype=mine.dtype)
    whole[rank] = mine
    piece = mine
    for step in range(world - 2):
        send(piece, (rank + 1) % world)
        piece = recv((rank - 1) % world)
        whole[(rank - step - 1) % world] = piece
    return whole.reshape(-1)
