"""gradient 1 is the un-reduced local gradient"""

import torch


def unequal_tokens(grads, tokens, rank, world, dist):
    total = torch.tensor(float(tokens))
    dist.all_reduce(total)
    grads[0] *= tokens / total
    dist.all_reduce(grads[0])
