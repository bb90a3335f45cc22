# %% [markdown]
# # Exercise 06 · Shard, pad, and put together again
#
# FSDP cuts a parameter by rows. Every rank gets `ceil(rows / N)` of them, in order; the last ranks may get fewer, or none at all. So that
# all ranks can send equally many bytes, a shard that is too short is filled up with rows of zeros: **padding**.
#
# ```
# 5 rows on 4 ranks, 2 a rank:    rank 0 [0 1]   rank 1 [2 3]   rank 2 [4 ·]   rank 3 [· ·]       · is a row of zeros
# ```
#
# Write a function that returns two things: this rank's shard with its padding, and a function `unshard()` that gathers the whole
# weight from all ranks and returns it, in its true shape, whenever it is called. After your function has returned, the whole weight
# is thrown away. Only shards are left.
#
# | property | what it means here |
# |---|---|
# | values | the shard has the right rows and its padding is zero; `unshard()` is the weight, bit for bit |
# | sharding | what is alive afterwards is one shard: `ceil(rows / N)` rows |
# | lifetime | the whole weight of an `unshard()` is gone when nobody holds it any more |
# | order | one collective in each `unshard()`, none before |
# | bytes | a rank sends no more than N-1 times its shard in each `unshard()` |
# | no hang | every rank comes to the end |
#
# The weight may have one dimension or more, any dtype, and fewer rows than there are ranks. You may use `torch` and
# `torch.distributed` (the process group is there). About 30 minutes.

# %%
import torch
import torch.distributed as dist

from fsdp_ref.lab import check


# %%
def shard_and_pad(weight, rank, world):
    """Cut a weight by rows.

    weight  tensor [rows, ...], the same on every rank
    return  (shard, unshard): a tensor [ceil(rows / world), ...] with memory of its own, and a function without arguments that returns
            the whole weight [rows, ...]
    """
    # BEGIN SOLUTION
    rows, others = weight.shape[0], weight.shape[1:]
    each = -(-rows // world)
    begin, end = min(rank * each, rows), min((rank + 1) * each, rows)
    shard = weight.new_zeros(each, *others)                             # [each, ...]
    shard[:end - begin] = weight[begin:end]

    def unshard():
        padded = shard.new_empty(world * each, *others)                 # [N each, ...]
        dist.all_gather_into_tensor(padded, shard)
        return padded[:rows]                                            # [rows, ...]

    return shard, unshard
    # END SOLUTION


# %% [markdown]
# The check runs your function on fresh ranks and shows what it finds. Run it as often as you like.

# %% tags=["check"]
check("shard_and_pad", shard_and_pad)
