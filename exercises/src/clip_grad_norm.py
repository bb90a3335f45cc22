# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercise 09 · One norm over all shards
#
# Gradients are clipped by their norm: when it is larger than `max_norm`, all of them are scaled by `max_norm / norm`. The norm is that of
# the **whole** gradient, and no rank holds it.
#
# - `shards`: a list of 1-D tensors, this rank's slices of the gradients. Scale them in place.
# - `real[i]`: how many leading elements of `shards[i]` are gradient. The rest is padding and may hold **anything**. A rank may have 0
#   real elements of a parameter, or of all.
# - `norm_type`: the order of the norm, 2 or another number, or infinity (the largest absolute value)
# - `all_reduce(tensor, op)`: puts the sum (`op="sum"`) or the maximum (`op="max"`) over the ranks into `tensor`
#
# Return the norm before clipping. When it is below `max_norm`, nothing is scaled.
#
# Rank 0 holds [3 0], rank 1 holds [4]: the norm of order 2 is 5. The sum of the two ranks' norms would be 7.
#
# | judged | what counts |
# |---|---|
# | values | the norm, and the same scaling on every rank |
# | sharding | no gradient leaves its rank |
# | order | one all-reduce |
# | bytes | of one number |
# | no hang | every rank takes part, also one that holds nothing |
#
# About 25 minutes.

# %%
import math

import torch

from fsdp_ref.lab import check


# %%
def clip_grad_norm(shards, real, max_norm, norm_type, all_reduce):
    """Scale `shards` in place; return the norm of all ranks' real elements before that."""
    # BEGIN SOLUTION
    mine = [shard[:count].abs() for shard, count in zip(shards, real, strict=True)]
    if math.isinf(norm_type):
        total = torch.tensor(max([float(piece.max()) for piece in mine if piece.numel()], default=0.0))
        all_reduce(total, "max")
    else:
        total = torch.tensor(sum(float((piece**norm_type).sum()) for piece in mine))
        all_reduce(total, "sum")
        total = total ** (1 / norm_type)
    factor = min(1.0, max_norm / (float(total) + 1e-6))
    for shard in shards:
        shard.mul_(factor)
    return total
    # END SOLUTION


# %% [markdown]
# The check runs your function on fresh ranks and says what it finds. Run it as often as you like.

# %% tags=["check"]
check("clip_grad_norm", clip_grad_norm)
