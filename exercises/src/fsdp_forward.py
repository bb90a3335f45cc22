# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercise 07 · FSDP's forward: gather, compute, free
#
# Under ZeRO-3 a rank rests with a slice of every weight. A layer's weights are whole only while it computes. You write what runs just
# before a unit's forward and just after it.
#
# A **unit** is one layer. You are given it as an object:
#
# - `unit.shard`: this rank's slice of the unit's weights, 1-D, padded with zeros so that all ranks' slices are equally long
# - `unit.full`: the whole flat weights, 1-D, `unit.world` times as long as `unit.shard`. **At rest its storage has no bytes.**
# - `unit.module`: the layer. Its parameters are *views* of `unit.full`: what you write there, the layer sees
# - `unit.rank`, `unit.world`, `unit.name`
#
# and a function `all_gather(out, mine)`, which fills `out` with the `mine` of every rank, in rank order.
#
# Return two functions, `(before, after)`. The check calls them around each unit's forward: `before(); y = unit.module(x); after()`.
# Between two steps the shards change, as an optimizer changes them.
#
# A tensor's memory is its **storage**, which several tensors may share: `tensor.untyped_storage()`. It has `.nbytes()`, and `.resize_(n)`
# changes how many bytes there are, for all tensors that share it.
#
# | judged | what counts |
# |---|---|
# | values | the layers compute what they would with whole weights, in each step |
# | sharding | at rest a rank holds its shards and nothing else |
# | lifetime | after a unit's forward none of its whole weights are alive, not even as a copy |
# | order | every unit is gathered before its forward, every time |
# | bytes | one all-gather of each unit in each step |
# | no hang | every rank comes to the end |
#
# About 20 minutes.

# %%
from fsdp_ref.lab import check


# %%
def fsdp_forward(unit, all_gather):
    """Two functions, (before, after): what runs around the forward of this unit."""
    # BEGIN SOLUTION
    storage = unit.full.untyped_storage()

    def before():
        storage.resize_(unit.full.numel() * unit.full.element_size())
        all_gather(unit.full, unit.shard)

    def after():
        storage.resize_(0)

    return before, after
    # END SOLUTION


# %% [markdown]
# The check runs your function on fresh ranks and says what it finds. Run it as often as you like.

# %% tags=["check"]
check("fsdp_forward", fsdp_forward)
