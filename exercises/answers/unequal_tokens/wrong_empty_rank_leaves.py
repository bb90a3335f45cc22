"""rank 2 returned already"""

import torch


def unequal_tokens(grads, tokens, rank, world, dist):
    if tokens == 0:
        return
    total = torch.tensor(float(tokens))
    dist.all_reduce(total)
    for grad in grads:
        grad *= tokens / total
        dist.all_reduce(grad)
