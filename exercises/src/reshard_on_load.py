# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercise 11c · Load on another number of ranks
#
# A tensor of `rows` rows was saved in slices by some number of ranks, and is loaded by another number. Each rank reads the rows it will
# hold, wherever they lie, and nothing else.
#
# - `pieces`: a list of `(file, first, count)`: this file holds `count` rows, from row `first` of the tensor on. In **any order**; `count`
#   may be 0.
# - `read(file, first, count)`: `count` rows of a file from its row `first`, counted **within the file**, as a tensor of shape `(count,
#   width)`
# - a rank's rows follow `torch.chunk`: each rank gets ceil(`rows` / `world`) of them until there are no more. The last ranks may get
#   fewer, or none: then return a tensor of shape `(0, width)`.
#
# Ten rows saved by two ranks (0 to 4, 5 to 9) and loaded by three: rank 0 holds rows 0 to 3, rank 1 rows 4 to 7, rank 2 rows 8 and 9.
# Rank 1 reads row 4 of the first file, and rows 0 to 2 of the second.
#
# | judged | what counts |
# |---|---|
# | values | this rank's rows, in order |
# | sharding | no rank reads the whole tensor |
# | bytes | no row that is not needed, and one read a file |
# | no hang | every rank comes to the end |
#
# About 25 minutes.

# %%
import torch

from fsdp_ref.lab import check


# %%
def reshard_on_load(rows, width, pieces, rank, world, read):
    """This rank's rows, shape (number of rows, width)."""
    # BEGIN SOLUTION
    each = -(-rows // world)                                        # rounded up
    begin = min(rank * each, rows)
    end = min(begin + each, rows)
    found = [torch.empty(0, width)]
    for file, first, count in sorted(pieces, key=lambda piece: piece[1]):
        low, high = max(begin, first), min(end, first + count)
        if low < high:
            found.append(read(file, low - first, high - low))
    return torch.cat(found)
    # END SOLUTION


# %% [markdown]
# The check runs your function on fresh ranks and says what it finds. Run it as often as you like.

# %% tags=["check"]
check("reshard_on_load", reshard_on_load)
