# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # All-gather round a ring
#
# Before: every rank holds one **piece**, a 1-D tensor, equally long everywhere. After: every rank holds all pieces, in rank order, as one
# tensor of `world` times that length. That is an all-gather, and this is how libraries do it on many machines: round a ring.
#
# In each step every rank sends **one piece** to the **next** rank, `(rank + 1) % world`, and receives one from the rank before.
#
# You are given two functions:
#
# - `send(tensor, to)` hands a tensor over for rank `to`. It does not wait.
# - `recv(source)` waits for the next tensor that rank `source` sends to you, and returns it.
#
# | judged | what counts |
# |---|---|
# | values | every rank returns every piece, at the place of the rank it came from |
# | no hang | nobody waits for a message that never comes |
# | order | messages go to one neighbour and come from the other, nowhere else |
# | bytes | a rank sends `world - 1` pieces, no more |

# %%
import torch

from fsdp_ref.lab import check


# %%
def ring_all_gather(mine, rank, world, send, recv):
    """All pieces in rank order, shape (world * len(mine),)."""
    # BEGIN SOLUTION
    whole = torch.empty(world, len(mine), dtype=mine.dtype)
    whole[rank] = mine
    piece = mine
    for step in range(world - 1):
        send(piece, (rank + 1) % world)
        piece = recv((rank - 1) % world)
        whole[(rank - step - 1) % world] = piece      # it began its way step + 1 ranks before this one
    return whole.reshape(-1)
    # END SOLUTION


# %% tags=["check"]
check("ring_all_gather", ring_all_gather)
