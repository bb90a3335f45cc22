"""the remainder is lost"""

import torch


def reshard_on_load(rows, width, pieces, rank, world, read):
    each = rows // world
    begin = min(rank * each, rows)
    end = min(begin + each, rows)
    found = [torch.empty(0, width)]
    for file, first, count in sorted(pieces, key=lambda piece: piece[1]):
        low, high = max(begin, first), min(end, first + count)
        if low < high:
            found.append(read(file, low - first, high - low))
    return torch.cat(found)
