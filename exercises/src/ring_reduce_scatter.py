# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Reduce-scatter round a ring
#
# Before: every rank holds a 1-D tensor of `world` **chunks**, equally long. After: rank `r` holds chunk `r`, summed over all ranks. This is
# what happens to gradients under ZeRO-2 and ZeRO-3.
#
# In each step every rank sends **one chunk** to the **next** rank, `(rank + 1) % world`, and receives one from the rank before. With two
# ranks and chunks of two: rank 0 `[1 2 | 3 4]`, rank 1 `[5 6 | 7 8]` gives rank 0 `[6 8]`, rank 1 `[10 12]`.
#
# - `send(tensor, to)` hands a tensor over for rank `to`. It does not wait.
# - `recv(source)` waits for the next tensor that rank `source` sends to you, and returns it.
#
# | judged | what counts |
# |---|---|
# | values | rank `r` returns the sum of chunk `r`, and nothing else |
# | no hang | nobody waits for a message that never comes |
# | order | messages go to one neighbour and come from the other, nowhere else |
# | bytes | a rank sends `world - 1` chunks, no more |

# %%
from fsdp_ref.lab import check


# %%
def ring_reduce_scatter(mine, rank, world, send, recv):
    """Chunk `rank` of the sum over all ranks, shape (len(mine) // world,)."""
    # BEGIN SOLUTION
    chunks = mine.reshape(world, -1)
    total = chunks[(rank - 1) % world]
    for step in range(world - 1):
        send(total, (rank + 1) % world)
        total = recv((rank - 1) % world) + chunks[(rank - step - 2) % world]      # one more part in the sum so far
    return total
    # END SOLUTION


# %% tags=["check"]
check("ring_reduce_scatter", ring_reduce_scatter)
