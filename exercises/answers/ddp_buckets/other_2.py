"""Recursion over what is left; scaled before the sum; written back by slices into a preallocated buffer."""

import torch


def ddp_buckets(grads, bucket_bytes, rank, world, dist):
    if not grads:
        return
    count, elements = 1, grads[-1].numel()
    while count < len(grads) and 4 * (elements + grads[-count - 1].numel()) <= bucket_bytes:
        count += 1
        elements += grads[-count].numel()
    buffer = torch.empty(elements)
    slices, begin = [], 0
    for grad in grads[-count:][::-1]:
        slices.append((grad, slice(begin, begin + grad.numel())))
        begin += grad.numel()
    for grad, place in slices:
        buffer[place] = grad.flatten() / world
    dist.all_reduce(buffer)
    for grad, place in slices:
        grad.view(-1)[:] = buffer[place]
    ddp_buckets(grads[:-count], bucket_bytes, rank, world, dist)
