"""no gradient of rank 0 has changed"""

import torch


def ddp_buckets(grads, bucket_bytes, rank, world, dist):
    together, held = [[]], 0
    for grad in reversed(grads):
        size = 4 * grad.numel()
        if together[-1] and held + size > bucket_bytes:
            together.append([])
            held = 0
        together[-1].append(grad)
        held += size
    for bucket in together:
        flat = torch.cat([grad.flatten() for grad in bucket])
        dist.all_reduce(flat, op=dist.ReduceOp.AVG)
