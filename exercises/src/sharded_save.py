# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercise 11a · A sharded checkpoint, all or nothing
#
# Every rank holds a slice of the model and saves that slice. Any rank may be **killed at any moment**. A folder whose name is that of a
# checkpoint must never hold anything but a whole checkpoint, because whoever reads believes the name.
#
# Step 7 on two ranks becomes
#
#     step-00000007/rank-0.safetensors
#     step-00000007/rank-1.safetensors
#
# `shards` is a dict from name to tensor. All ranks write to the same `disk`. Paths are relative to its root:
#
# - `disk.mkdir(path)` makes a folder, and raises `FileExistsError` when there is one
# - `disk.write(path, tensors)` writes a safetensors file. Killed in between, it leaves **half** of it.
# - `disk.sync(path)` returns when a file or folder is safe from a power cut. Before that, a written file may be empty afterwards.
# - `disk.rename(old, new)` happens at once or not at all, for whole folders too
# - `disk.remove(path)`, `disk.exists(path)`, `disk.list(path=".")`
#
# `barrier()` returns when every rank has come to it. What another rank did before its barrier you know after yours, and nothing else.
#
# The function returns on every rank when the checkpoint is there. Older checkpoints stay. A run that was killed is started again **on the
# same disk**, with whatever the dead one left.
#
# | judged | what counts |
# |---|---|
# | values | each file holds its rank's tensors |
# | no hang | all ranks call the same barriers |
# | sharding | each rank writes its own bytes, and no other's |
# | order | who publishes knows that all was written and synced; nobody returns before |
# | atomic | killed before each operation of each rank, and in the middle of each write: only whole checkpoints, and the next try works |
#
# About 40 minutes.

# %%
from fsdp_ref.lab import check


# %%
def sharded_save(disk, step, shards, rank, world, barrier):
    """Save this rank's shards; return when the whole checkpoint of this step has its name."""
    # BEGIN SOLUTION
    final = f"step-{step:08d}"
    partial = final + ".partial"
    if rank == 0:
        if disk.exists(partial):
            disk.remove(partial)                    # a run that was killed left it
        disk.mkdir(partial)
    barrier()                                       # the folder is there
    file = f"{partial}/rank-{rank}.safetensors"
    disk.write(file, shards)
    disk.sync(file)
    barrier()                                       # everything is written
    if rank == 0:
        disk.sync(partial)
        disk.rename(partial, final)
        disk.sync(".")
    barrier()                                       # it has its name
    # END SOLUTION


# %% [markdown]
# The check runs your function on fresh ranks and says what it finds. Run it as often as you like.

# %% tags=["check"]
check("sharded_save", sharded_save)
