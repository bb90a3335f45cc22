# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Gradients averaged in buckets
#
# One all-reduce a parameter wastes time on many small messages; one for everything cannot start before backward ends. DDP puts gradients
# into **buckets**: flat tensors of at most `bucket_bytes`, each reduced by one call.
#
# Backward makes the last parameter's gradient first. So go **from the last gradient to the first**, and begin a new bucket when the next
# gradient would bring the current one above `bucket_bytes`. A gradient that is larger than that has a bucket of its own.
#
# With gradients of 16, 24, 20 and 12 bytes and buckets of 32: 12 + 20 fill the first, 24 goes alone (16 more would be 40), then 16.
#
# `grads` is a list of float32 tensors; change them in place, to the mean over all ranks.
#
# | judged | what counts |
# |---|---|
# | values | the mean, on every rank, for every gradient |
# | order | one call a bucket, the right gradients in each, the last gradients first |
# | lifetime | no tensor larger than the largest bucket |
# | bytes | each gradient travels once |
# | no hang | every rank makes the same calls |

# %%
import torch

from fsdp_ref.lab import check


# %%
def ddp_buckets(grads, bucket_bytes, rank, world, dist):
    """Average `grads` in place; `dist` is torch.distributed."""
    # BEGIN SOLUTION
    together, room = [], -1
    for grad in reversed(grads):
        nbytes = grad.numel() * grad.element_size()
        if nbytes > room:
            together.append([])
            room = max(bucket_bytes, nbytes)
        together[-1].append(grad)
        room -= nbytes
    for bucket in together:
        flat = torch.cat([grad.flatten() for grad in bucket])
        dist.all_reduce(flat, op=dist.ReduceOp.AVG)
        for grad, part in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
            grad.copy_(part.view_as(grad))
    # END SOLUTION


# %% tags=["check"]
check("ddp_buckets", ddp_buckets)
