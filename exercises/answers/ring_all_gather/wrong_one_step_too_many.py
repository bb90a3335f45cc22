"""the last is not needed"""

import torch


def ring_all_gather(mine, rank, world, send, recv):
    whole = torch.empty(world, len(mine), dtype=mine.dtype)
    piece = mine
    for step in range(world):
        send(piece, (rank + 1) % world)
        piece = recv((rank - 1) % world)
        whole[(rank - step - 1) % world] = piece
    return whole.reshape(-1)
