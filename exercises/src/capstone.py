# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercise 12 · Wrap a GPT inside a budget
#
# The last exercise: choose what becomes a unit, in which dtypes, and what stays whole between forward and backward. The model is a GPT
# with 336,896 parameters; `print(model)` shows its modules: `tokens`, `positions`, six `blocks` with `attn` (`qkv`, `proj`) and `mlp`
# (`up`, `down`), `norm`, and `head`, which shares its matrix with `tokens`. It will be trained with Adam in float32 on **8 ranks**.
#
# Call `fully_shard(module, reshard_after_forward=True, mp_policy=MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...))` on modules of
# `model`, as in a training script. A unit takes all parameters inside it that no unit before it took. Here the calls are written down and
# reckoned with:
#
# - **memory**: at most 1,480,000 bytes on a rank at the worst moment of a step. At rest a parameter is 16 bytes, over 8 ranks. On top
#   come the weights and gradients that are whole, and the buffers of a gather and a reduction. Activations are left out.
# - **bytes**: a rank sends at most 2,400,000 in a step
# - **messages**: at most 45 collectives in a step. A unit costs three, or two if it stays whole after forward.
# - gradients are summed in float32
#
# Return a dict with the numbers of your answers to three choices:
#
# `"worst moment"`: when does a rank hold most? (1) at the end of forward (2) in backward, when a unit's weights and gradients are whole,
# and the root's too (3) in the optimizer's step
#
# `"twice the ranks"`: on 16 ranks instead of 8, with the same units, the bytes that a rank sends in a step (1) are half as many (2) are
# twice as many (3) are nearly the same
#
# `"float32 sums"`: why are weights gathered in bfloat16 and gradients summed in float32? (1) every rank adds a rounding error to a sum,
# while a gather only copies (2) reductions send fewer bytes in float32 (3) Adam cannot read bfloat16
#
# | judged | what counts |
# |---|---|
# | values | the calls are possible, and gradients are summed in float32 |
# | sharding | every parameter belongs to a unit |
# | memory, bytes, messages | the budgets |
# | answers | the three choices |
# | no hang | the function returns |
#
# About 45 minutes.

# %%
import torch

from fsdp_ref.lab import check


# %%
def capstone(model, fully_shard, MixedPrecisionPolicy):
    """Wrap the model; return the answers to the three choices."""
    # BEGIN SOLUTION
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return {"worst moment": 2, "twice the ranks": 3, "float32 sums": 1}
    # END SOLUTION


# %% [markdown]
# The check runs your function on fresh ranks and says what it finds. Run it as often as you like.

# %% tags=["check"]
check("capstone", capstone)
