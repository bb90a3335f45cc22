"""write the result into the tensors of the list"""

import torch


def unequal_tokens(grads, tokens, rank, world, dist):
    total = torch.tensor(float(tokens))
    dist.all_reduce(total)
    for index, grad in enumerate(grads):
        share = grad * (tokens / total)
        dist.all_reduce(share)
        grads[index] = share
