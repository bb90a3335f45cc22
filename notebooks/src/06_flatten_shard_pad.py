# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06 · Flatten, shard, pad
#
# **Ten rows, four ranks: who holds which, what fills the gap, and who can be hurt by it?**
#
# Afterwards you can say which rows of any weight a rank holds, when a rank holds nothing, where padding may lie and where not, and what
# one flat parameter gains and costs against cutting each parameter by itself.
#
# You need: all-gather ([01](01_collectives.ipynb)) and the slice of [05](05_zero1_and_zero2.ipynb). Time: 20 minutes to read, half a
# minute to run.

# %%
from fsdp_ref.lab import ask, changed, check, predict, read, start

lab = start(ranks=4, timeout=20, limit=60)         # seconds for a collective, and for a cell: enough for a busy machine

# %% [markdown]
# ## What does not divide
#
# Notebook 05 cut a vector whose length was a multiple of four. Weights are matrices, cut by rows, and rows need not divide. Yet every
# rank should send equally many bytes in a collective, or each would first have to be told how many come from whom.

# %%
last = predict("06.last", "Ten rows on four ranks: how many does the last rank hold?")
empty = predict("06.empty", "Five rows on four ranks: how many ranks hold none?")

# %% [markdown]
# The rule is that of `torch.chunk`: divide, round up, and give every rank that many rows until there are none left. **Change `ROWS`** to
# 8, 9, 5, 3 or 1 and run the cell again. Look at the padding, and at who is left without a row.

# %% tags=["nbval-check-output"]
ROWS = 10

def piece(rows):
    """What this rank gets: rows of a chunk, its first row, how many rows."""
    return placements.chunk_rows(rows, world_size, rank)

for rank, (chunk, first, own) in enumerate(lab.run(piece, ROWS)):
    print(f"rank {rank}: {own} row(s) from row {first}, {chunk - own} of padding")

# %% tags=["nbval-check-output"]
last.reveal(lab.run(piece, 10)[3][2])
empty.reveal(sum(own == 0 for _, _, own in lab.run(piece, 5)))

# %% [markdown]
# Now with tensors. `shard` keeps this rank's rows in a chunk that is filled up with zeros; `gather` brings the chunks of all together.

# %%
# %%px
world, label = dist.group.WORLD, collectives.Label("weight", "by hand")

def shard(whole):
    """This rank's rows, filled up: (rows, ...) -> (chunk, ...)."""
    chunk, first, rows = placements.chunk_rows(len(whole), world_size, rank)
    own = whole.new_zeros(chunk, *whole.shape[1:])
    own[:rows] = whole[first : first + rows]
    return own


# %%
# %%px
def gather(own, rows):
    """The whole again: (chunk, ...) from everyone -> (rows, ...)."""
    padded = own.new_empty(world_size * len(own), *own.shape[1:])
    collectives.all_gather(padded.view(-1), own.view(-1), world, label).wait()
    return padded[:rows]                                # a view: no byte is moved again


# %%
changed("05:own_slice", "06:shard")

# %% [markdown]
# ## Why not spread the rows evenly?
#
# 3, 3, 3, 1 looks unfair; 3, 3, 2, 2 would be fairer, and no rank would be empty while there are more rows than ranks. See what the
# gather makes of it.

# %% tags=["nbval-check-output"]
# %%px
def shard_evenly(whole):
    """The same with rows spread as evenly as they go."""
    mine = whole.tensor_split(world_size)[rank]
    own = whole.new_full((-(-len(whole) // world_size),), -1.0)         # -1 shows where padding is
    own[: len(mine)] = mine
    return own

weight = torch.arange(10.0)
by_chunk, evenly = gather(shard(weight), 10).int().tolist(), gather(shard_evenly(weight), 12).int().tolist()
if rank == 0:
    print("by torch.chunk's rule:", by_chunk, "\nspread evenly:        ", evenly)

# %% [markdown]
# With chunk's rule all padding lies behind the last row, so the weight is simply the beginning of what was gathered. Spread evenly,
# padding lies *between* rows: the weight would have to be copied together once more, in every forward and every backward. One slice that
# is emptier costs less.
#
# ## Padding poisons what counts it
#
# You may have heard that padding is invisible: zeros change no sum. Here are ten rows, all 3.0.

# %%
mean = predict("06.mean", "The ranks average their chunks, zeros included: which mean of ten 3.0 comes out?")
norm = predict("06.norm", "Padding of 7.0, as reused memory may hold: by which factor is the norm of ten 3.0 off?", unit="times")


# %% tags=["nbval-check-output"]
# %%px
def over_ranks(value):
    """The sum of a number over all ranks."""
    total = torch.tensor([float(value)])
    collectives.all_reduce(total, world, label, op=dist.ReduceOp.SUM).wait()
    return total.item()

own = shard(torch.full((10,), 3.0))
poisoned_mean = over_ranks(own.sum()) / over_ranks(own.numel())
zeros_norm = over_ranks(own.square().sum()) ** 0.5
print("the largest of ten -3.0, as this rank sees it:", (0 - own).max().item())

# %% [markdown]
# On rank 3 zero is the largest of ten negative numbers. And who guarantees the zeros? `torch.empty` writes nothing, and memory that was
# used before holds whatever was there:

# %%
# %%px
own = shard(torch.full((10,), 3.0))
rows = placements.chunk_rows(10, world_size, rank)[2]
own[rows:] = 7.0                                                # what the memory's last user left there
seven_norm = over_ranks(own.square().sum()) ** 0.5
own[rows:] = float("nan")
nan_norm = over_ranks(own.square().sum()) ** 0.5
real_norm = over_ranks(own[:rows].square().sum()) ** 0.5        # real rows alone

# %% tags=["nbval-check-output"]
poisoned_mean, zeros_norm, seven_norm, nan_norm, real_norm = lab.run(
    lambda: (poisoned_mean, zeros_norm, seven_norm, nan_norm, real_norm))[0]
print(f"norm of the real rows {real_norm:.3f}; padded with zeros {zeros_norm:.3f}, with 7.0 {seven_norm:.3f}, with nan {nan_norm}")
mean.reveal(poisoned_mean)
norm.reveal(seven_norm / real_norm)
assert real_norm == zeros_norm and seven_norm == (90 + 2 * 49) ** 0.5 and nan_norm != nan_norm, "padding spoils the norm"

# %% [markdown]
# Zeros leave the norm alone, but not the mean, nor the maximum. A norm that is 1.4 times too large clips gradients too hard, silently. So
# the rule: padding exists in the buffers of collectives, and whoever computes sees real rows only. In the engine `to_local()` of a shard
# ends before the padding.
#
# ## In the engine: what `shape` says
#
# A model with awkward sizes, sharded.

# %%
# %%px
def awkward():
    """6 -> 10 -> 5: 60 + 10 + 50 + 5 = 125 weights, the same on every rank."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.Linear(10, 5))

model = awkward()
for layer in (model[0], model[2], model):
    fully_shard(layer)                                      # inner units first


# %%
# %%px
def note(layer, args):
    """What the layer holds just before it computes."""
    inside.append(f"{type(layer.weight).__name__} {tuple(layer.weight.shape)}")

inside = []
model[0].register_forward_pre_hook(note)                    # runs after the engine's own
x = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
with record() as book:
    output = model(x)

# %%
shape = predict("06.shape", "Outside forward `model[0].weight.shape` is (10, 6) on each rank. How many rows has rank 3 in memory?")

# %% tags=["nbval-check-output"]
# %%px
weight = model[0].weight
print("outside", type(weight).__name__, tuple(weight.shape), "holds", tuple(weight.to_local().shape), "| inside", inside[0])

# %% tags=["nbval-check-output"]
shape.reveal(lab.run(lambda: len(model[0].weight.to_local()))[3])

# %% [markdown]
# Outside forward the parameter is a `DTensor`: its `shape` is that of the layer, and what the rank holds is `to_local()`. Inside the
# unit's forward it is an ordinary parameter, and whole. You may have heard that outside forward `shape` is not the layer's. That was
# FSDP1, see below; here it is, but it does not tell what the rank holds.

# %%
from fsdp_ref import viz

book = lab.run(lambda: collectives.gather_ledgers(book))[0]
viz.shard_map(book)

# %% [markdown]
# ## Empty shards
#
# Rank 3 holds no row of the last layer. That is correct, and a trap: an operation that needs at least one element fails on rank 3
# *alone*, and if a collective follows, the others wait for it ([02](02_when_ranks_disagree.ipynb)).

# %% tags=["nbval-check-output"]
# %%px
local = model[2].weight.to_local()
try:
    print(tuple(local.shape), f"largest {local.max():.3f}")
except RuntimeError as error:
    print(tuple(local.shape), type(error).__name__, "from max()")

# %% [markdown]
# This is what an infinity norm does. The engine puts a zero in the place of an empty shard, where it can change no norm, so clipping
# works. Every rank has the same input here, so the mean gradient is that of the unsharded model:

# %%
# %%px
output.square().sum().backward()
plain = awkward()
plain(x).square().sum().backward()
largest = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type=float("inf")).full_tensor().item()
wanted = max(param.grad.abs().max().item() for param in plain.parameters())

# %% tags=["nbval-check-output"]
measured = lab.run(lambda: (largest, wanted))
print("the largest gradient, sharded and not, on four ranks:", [f"{a:.4f} {b:.4f}" for a, b in measured])
assert all(abs(a - b) < 1e-6 for a, b in measured), "the norm over shards is the norm of the whole"

# %%
read("clipping.py", "_never_empty")

# %% [markdown]
# ## One flat parameter instead
#
# FSDP1 joins all parameters of a unit into one flat vector and cuts that, in the middle of rows if need be. How much is padded? Derive
# it:
#
# - **By parameter**, on four ranks: (12 − 10)·6 + (12 − 10) + (8 − 5)·10 + (8 − 5) elements.
# - **Flat**: 125 elements, filled up to the next multiple of four.

# %%
by_parameter = predict("06.by_parameter", "Cut by parameter: how many elements of padding, all ranks together?", unit="elements")
flat_padding = predict("06.flat", "And with one flat parameter?", unit="elements")

# %%
# %%px
flat_model = contrast.flat.flat_shard(awkward(), units=[])
with record() as flat_book:
    pass
slices = [(name, tuple(param.shape)) for name, param in flat_model.named_parameters()]

# %% tags=["nbval-check-output"]
import math


def padding(book):
    """Elements of padding in all shards of a ledger."""
    return sum((row.padded_rows - row.rows) * math.prod(row.shape[1:]) for row in book.shards)

flat_book = lab.run(lambda: collectives.gather_ledgers(flat_book))[0]
flat_book.shards = [row for row in flat_book.shards if "flat" in row.name]      # the first model is still on the books
by_parameter.reveal(padding(book))
flat_padding.reveal(padding(flat_book))
assert (padding(book), padding(flat_book)) == (2 * 6 + 2 + 3 * 10 + 3, 128 - 125), "as derived"

# %%
viz.shard_map(flat_book)

# %% tags=["nbval-check-output"]
# %%px --targets 1
start = rank * flat_model.flat_param.numel()
print("parameters of the model:", slices, f"\nrank 1 begins at element {start}: row {start // 6}, column {start % 6} of the first weight")

# %% [markdown]
# Less padding, and one message without copies around it. The price: outside forward `model[0].weight` does not exist, only a slice that
# begins in the middle of a row. So a unit has one dtype and one `requires_grad`, an optimizer cannot treat two weights of a unit
# differently, and a state dict in the original names needs communication. FSDP2 and this engine therefore cut by rows.

# %% tags=["nbval-check-output"]
def share_of_padding(dim, ranks):
    """Padding of one GPT block, cut by rows, as a share of its weights."""
    rows = {3 * dim: dim + 1, dim: dim + 1 + 4 * dim + 1 + 4, 4 * dim: dim + 1}        # rows: elements in them
    padded = sum((-n % ranks) * width for n, width in rows.items())
    return padded / sum(n * width for n, width in rows.items())

print(f"width 4096 on 64 ranks: {share_of_padding(4096, 64):.2%}; width 4100 on 64 ranks: {share_of_padding(4100, 64):.2%}")

# %% [markdown]
# In models of usual widths padding costs nothing, in odd ones about a percent. It matters for correctness, not for memory.
#
# ## Where this lives in the source
#
# [`fsdp_ref/engine/param.py`](../fsdp_ref/engine/param.py) follows one parameter; its note *why the shard is padded* is the argument
# above. [`fsdp_ref/contrast/flat.py`](../fsdp_ref/contrast/flat.py) is the flat way, complete. The rule:

# %%
read("placements.py", "chunk_rows")

# %% [markdown]
# ## Check and quiz
#
# [The exercise](../exercises/release/shard_and_pad.ipynb): shard and unshard for shapes you do not know beforehand, empty shards
# included.

# %%
check("shard_and_pad")

# %%
ask("06")

# %% [markdown]
# ## What to take along
#
# - Rows are cut by torch.chunk's rule: equal chunks, padding at the very end, perhaps empty shards.
# - Padding belongs into buffers. A norm, a mean or a maximum that sees it is wrong, or fails on one rank alone.
# - `shape` is the layer's; `to_local()` is what the rank holds; inside forward the weight is whole.
# - Flat parameters pad less and cost their names. How a weight becomes whole, and for how long: [07](07_fsdp_forward.ipynb).
#
# **Papers:** Zhao et al., *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel*, section 3.2 (sharding strategies) and 4.2
# (flat parameters).
