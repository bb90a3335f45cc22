"""makes a tensor of"""

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
    whole = torch.cat([grad.flatten() for bucket in together for grad in bucket])
    place = 0
    for bucket in together:
        begin = place
        place += sum(grad.numel() for grad in bucket)
        dist.all_reduce(whole[begin:place], op=dist.ReduceOp.AVG)
    place = 0
    for grad in (grad for bucket in together for grad in bucket):
        grad.copy_(whole[place:place + grad.numel()].view_as(grad))
        place += grad.numel()
