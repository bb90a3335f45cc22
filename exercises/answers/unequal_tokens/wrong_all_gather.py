"""(all-gather) and needs no more than"""

import torch


def unequal_tokens(grads, tokens, rank, world, dist):
    counts = torch.zeros(world)
    dist.all_gather_into_tensor(counts, torch.tensor([float(tokens)]))
    for grad in grads:
        everybody = [torch.empty_like(grad) for _ in range(world)]
        dist.all_gather(everybody, grad)
        grad.copy_(sum(each * count for each, count in zip(everybody, counts, strict=True)) / counts.sum())
