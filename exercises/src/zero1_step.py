# %% [markdown]
# # Exercise 05a · A step of ZeRO-1
#
# Under ZeRO-1 every rank holds the whole parameters, but the optimizer's state for its own slice alone. Write one training step.
#
# All parameters of the model lie one after the other in one flat tensor, `flat`, the same on every rank. Its length divides by the
# number of ranks. `grad` has the same length: the gradient of *this rank's* part of the batch. `state` is a dictionary, empty
# before the first step, which you get back in the next one.
#
# 1. The gradient to use is the **mean** over all ranks. A rank needs only its slice of it.
# 2. Update your slice with `momentum_step`, which keeps the momentum in `state`.
# 3. When your function returns, `flat` (the same tensor, changed in place) holds the new parameters of **all** slices on every rank.
#
# What is checked, on two to four ranks and over several steps:
#
# | property | what it means here |
# |---|---|
# | values | `flat` is what one process with the mean gradient would get |
# | sharding | between steps a rank holds the momentum of its slice and no more: 4P/N bytes |
# | lifetime | nothing else of your making is alive when the function returns |
# | order | one reduction of the gradient, then one gathering of the parameters, in every step |
# | bytes | a rank sends no more than 2(N-1)/N times the parameters, which is what DDP's all-reduce sends too |
# | no hang | every rank comes to the end |
#
# You may use `torch` and `torch.distributed` (the process group is there). About 20 minutes.

# %%
import torch
import torch.distributed as dist

from fsdp_ref.lab import check


def momentum_step(param, grad, state, lr):
    """Change `param` in place: v = 0.9 v + grad, param = param - lr v. The momentum v is kept in state["v"]."""
    if "v" not in state:
        state["v"] = torch.zeros_like(param)
    state["v"].mul_(0.9).add_(grad)
    param.sub_(lr * state["v"])


# %%
def zero1_step(flat, grad, state, rank, world, lr):
    """One step of ZeRO-1 on this rank.

    flat   float tensor [P], the parameters, the same on every rank; changed in place
    grad   float tensor [P], the gradient of this rank's part of the batch
    state  dictionary, empty before the first step
    """
    # BEGIN SOLUTION
    rows = flat.numel() // world
    mine = flat[rank * rows:(rank + 1) * rows].clone()                  # [P/N]
    part = torch.empty_like(mine)                                       # [P/N]
    dist.reduce_scatter_tensor(part, grad, op=dist.ReduceOp.AVG)
    momentum_step(mine, part, state, lr)
    dist.all_gather_into_tensor(flat, mine)                             # [P]
    # END SOLUTION


# %% [markdown]
# The check runs your function on fresh ranks and shows what it finds. Run it as often as you like.

# %% tags=["check"]
check("zero1_step", zero1_step)
