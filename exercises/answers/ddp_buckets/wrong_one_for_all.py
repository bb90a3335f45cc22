"""one call with everything"""

import torch


def ddp_buckets(grads, bucket_bytes, rank, world, dist):
    together = [list(reversed(grads))]
    for bucket in together:
        flat = torch.cat([grad.flatten() for grad in bucket])
        dist.all_reduce(flat, op=dist.ReduceOp.AVG)
        place = 0
        for grad in bucket:
            grad.copy_(flat[place:place + grad.numel()].view_as(grad))
            place += grad.numel()
