"""it reads all 8 rows to keep 4"""

import torch


def reshard_on_load(rows, width, pieces, rank, world, read):
    whole = torch.cat([read(file, 0, count) for file, first, count in sorted(pieces, key=lambda piece: piece[1])])
    each = -(-rows // world)
    return whole[rank * each:(rank + 1) * each]
