"""Everything in one flat tensor, the number of tokens as its last element."""

import torch


def unequal_tokens(grads, tokens, rank, world, dist):
    flat = torch.cat([grad.reshape(-1) * tokens for grad in grads] + [torch.tensor([float(tokens)])])
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    place = 0
    for grad in grads:
        grad.copy_(flat[place:place + grad.numel()].view_as(grad) / flat[-1])
        place += grad.numel()
