"""in a ring every rank sends to one neighbour"""

import torch


def ring_all_gather(mine, rank, world, send, recv):
    for other in range(world):
        if other != rank:
            send(mine, other)
    return torch.cat([mine if source == rank else recv(source) for source in range(world)])
