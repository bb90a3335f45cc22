"""not your own"""

import torch


def ring_all_gather(mine, rank, world, send, recv):
    whole = torch.empty(world, len(mine), dtype=mine.dtype)
    whole[rank] = mine
    for step in range(world - 1):
        send(mine, (rank + 1) % world)
        whole[(rank - step - 1) % world] = recv((rank - 1) % world)
    return whole.reshape(-1)
