"""One pass: a bucket is sent off as soon as it is full, and all are waited for at the end."""

import torch


def ddp_buckets(grads, bucket_bytes, rank, world, dist):
    sent = []

    def send_off(bucket):
        flat = torch.cat([grad.reshape(-1) for grad in bucket])
        sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    bucket, held = [], 0
    for index in range(len(grads) - 1, -1, -1):
        size = 4 * grads[index].numel()
        if bucket and held + size > bucket_bytes:
            send_off(bucket)
            bucket, held = [], 0
        bucket.append(grads[index])
        held += size
    send_off(bucket)
    for bucket, flat, work in sent:
        work.wait()
        place = 0
        for grad in bucket:
            grad.copy_(flat[place:place + grad.numel()].reshape(grad.shape)).div_(world)
            place += grad.numel()
