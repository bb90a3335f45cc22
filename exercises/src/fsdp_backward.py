# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercise 08 · FSDP's backward: gather again, reduce, free
#
# Forward has run, and every unit's weights were freed. Backward needs them again, and brings a whole gradient on every rank: of its own
# part of the batch. You write what runs just before a unit's backward and just after it.
#
# The unit is that of exercise 07: `unit.shard`, `unit.full` (its storage is empty), `unit.module` (weight, then bias: views of
# `unit.full`), `unit.rank`, `unit.world`. Besides:
#
# - `unit.grad_shard`: where the slice of the gradient goes, shaped like `unit.shard`. `None` at first. When there is something in it
#   already, add: gradients accumulate until the optimizer's step.
# - `all_gather(out, mine)` fills `out` with everyone's `mine`, in rank order.
# - `reduce_scatter(out, full)` fills `out` with this rank's slice of the **sum** of everyone's `full`.
#
# Return `(before, after)`. `after` is called when the `.grad` of every parameter of the unit is there. In it, put this rank's slice of
# the **mean** gradient into `unit.grad_shard`, and leave nothing whole behind.
#
# With two ranks and three elements: the gradients [1 2 3] and [5 6 7] are padded to [1 2 3 0] and [5 6 7 0]; their mean is [3 4 5 0];
# rank 0 keeps [3 4] and rank 1 [5 0].
#
# | judged | what counts |
# |---|---|
# | values | each rank holds its slice of the mean gradient, added up over several backwards |
# | sharding | `unit.grad_shard` is as long as `unit.shard` |
# | lifetime | after a unit's backward neither its weights nor its gradients are whole |
# | order | all-gather, backward, reduce-scatter, from the last unit to the first |
# | bytes | one all-gather and one reduce-scatter of each unit |
# | no hang | every rank comes to the end |
#
# About 30 minutes.

# %%
import torch

from fsdp_ref.lab import check


# %%
def fsdp_backward(unit, all_gather, reduce_scatter):
    """Two functions, (before, after): what runs around the backward of this unit."""
    # BEGIN SOLUTION
    storage = unit.full.untyped_storage()

    def before():
        storage.resize_(unit.full.numel() * unit.full.element_size())
        all_gather(unit.full, unit.shard)

    def after():
        flat = torch.cat([param.grad.flatten() for param in unit.module.parameters()])
        whole = torch.zeros(unit.world * unit.shard.numel())                # padding stays zero
        whole[: flat.numel()] = flat
        mine = torch.empty_like(unit.shard)
        reduce_scatter(mine, whole)
        mine /= unit.world
        unit.grad_shard = mine if unit.grad_shard is None else unit.grad_shard + mine
        for param in unit.module.parameters():
            param.grad = None
        storage.resize_(0)

    return before, after
    # END SOLUTION


# %% [markdown]
# The check runs your function on fresh ranks and says what it finds. Run it as often as you like.

# %% tags=["check"]
check("fsdp_backward", fsdp_backward)
