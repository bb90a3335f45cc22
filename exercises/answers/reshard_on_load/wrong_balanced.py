"""this is another cut"""

import torch


def reshard_on_load(rows, width, pieces, rank, world, read):
    each, extra = divmod(rows, world)
    begin = rank * each + min(rank, extra)
    end = begin + each + (rank < extra)
    found = [torch.empty(0, width)]
    for file, first, count in sorted(pieces, key=lambda piece: piece[1]):
        low, high = max(begin, first), min(end, first + count)
        if low < high:
            found.append(read(file, low - first, high - low))
    return torch.cat(found)
