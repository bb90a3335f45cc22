"""but the others' are missing"""

import torch


def unequal_tokens(grads, tokens, rank, world, dist):
    total = torch.tensor(float(tokens))
    dist.all_reduce(total)
    for grad in grads:
        grad *= tokens / total
