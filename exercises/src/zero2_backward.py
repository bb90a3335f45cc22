# %% [markdown]
# # Exercise 05b · Backward under ZeRO-2
#
# Under ZeRO-2 a rank keeps its slice of every gradient. The whole gradient of a layer exists only for a moment: backward produces it,
# a reduce-scatter turns it into slices, and it is freed before backward comes to the next layer.
#
# `loss` is the loss of this rank's part of the batch and `params` are the parameters of the model, first layer first. Call
# `loss.backward()` yourself, and return a list: for each parameter, this rank's slice of the **mean** gradient, as a flat tensor of
# `numel / world` elements (the sizes divide). Afterwards every `p.grad` is `None`.
#
# A tensor can tell you when its gradient is complete: `p.register_post_accumulate_grad_hook(f)` calls `f(p)` in the middle of
# backward, as soon as `p.grad` is there.
#
# | property | what it means here |
# |---|---|
# | values | slice r of the mean gradient is on rank r, for every parameter, in the order of `params` |
# | sharding | what is alive afterwards is the slices: P/N elements |
# | lifetime | never more than the slices and two whole gradients at once |
# | order | one reduce-scatter a parameter, the last layer first |
# | bytes | a rank sends no more than (N-1)/N times the parameters |
# | no hang | every rank comes to the end |
#
# You may use `torch` and `torch.distributed` (the process group is there). About 30 minutes.

# %%
import torch
import torch.distributed as dist

from fsdp_ref.lab import check


# %%
def zero2_backward(loss, params, rank, world):
    """Backward that keeps this rank's slices of the mean gradients.

    loss    a scalar with a graph; its parameters' gradients are None
    params  list of parameters, first layer first
    return  list of tensors [numel / world], in the order of params
    """
    # BEGIN SOLUTION
    slices = {}

    def reduce_and_free(param):
        whole = param.grad.reshape(-1)                                  # [numel]
        slices[param] = torch.empty(whole.numel() // world, dtype=whole.dtype)
        dist.reduce_scatter_tensor(slices[param], whole, op=dist.ReduceOp.AVG)
        param.grad = None

    hooks = [param.register_post_accumulate_grad_hook(reduce_and_free) for param in params]
    loss.backward()
    for hook in hooks:
        hook.remove()
    return [slices[param] for param in params]
    # END SOLUTION


# %% [markdown]
# The check runs your function on fresh ranks and shows what it finds. Run it as often as you like.

# %% tags=["check"]
check("zero2_backward", zero2_backward)
