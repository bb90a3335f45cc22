# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 07 · FSDP, forward
#
# **No rank holds a layer's weights. How does it compute with them, and how much memory does that take?**
#
# Afterwards you can write the two hooks that make a module's weights whole for the time of its forward, say what the peak of memory is
# made of, and choose units so that it is low.
#
# You need: all-gather ([01](01_collectives.ipynb)) and slices ([06](06_flatten_shard_pad.ipynb)). Time: 25 minutes to read, under a
# minute to run.

# %%
from fsdp_ref.lab import ask, changed, check, predict, read, start

lab = start(ranks=4, timeout=20, limit=60)         # seconds for a collective, and for a cell: enough for a busy machine

# %% [markdown]
# ## Gather, compute, free
#
# Between steps a rank holds a slice of each layer's weights. When a layer is about to compute, an **all-gather** brings its slices
# together (**unshard**); when it has computed, the whole is freed (**reshard**). The next layer does the same. So the layers take turns
# in the memory of one layer.
#
# Here it is by hand. What is gathered and freed together is called a **unit**. A unit keeps `own`, this rank's slice, and `whole`, a
# vector of which all its weights are views. The vector stays for ever; its *memory* comes and goes.

# %%
# %%px
def unshard(unit, args=None):
    """Give the whole its memory, and fill it with the slices of all ranks."""
    nbytes = unit.own.nbytes * world_size
    unit.whole.untyped_storage().resize_(nbytes)
    unit.token = ledger.allocate(ledger.Category.UNSHARDED_PARAM, unit.name, nbytes)      # for the pictures
    collectives.all_gather(unit.whole, unit.own, dist.group.WORLD, collectives.Label(unit.name, "forward")).wait()


# %%
# %%px
def reshard(unit, args=None, output=None):
    """Take the memory of the whole away. The slice is what is left."""
    unit.whole.untyped_storage().resize_(0)
    ledger.free(unit.token)


# %% [markdown]
# Two hooks, which PyTorch calls before and after each forward, do it at the right moments:

# %%
# %%px
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def shard_unit(unit, name):
    """Keep a slice of the unit's weights; gather before its forward, free after it."""
    unit.whole = parameters_to_vector(unit.parameters()).detach()          # (P,)
    vector_to_parameters(unit.whole, unit.parameters())                    # the weights become views of it
    unit.own, unit.name, unit.token = unit.whole.chunk(world_size)[rank].clone(), name, 0      # (P / N,)
    reshard(unit)
    unit.register_forward_pre_hook(unshard)
    unit.register_forward_hook(reshard)


# %% [markdown]
# What became of notebook 06's gather: the memory is no longer new each time, and the padding is gone, since the sizes here divide.

# %%
changed("06:gather", "07:unshard")

# %% [markdown]
# Six transformer blocks, twice: once whole on every rank, once sharded. Each rank has a batch of its own. Backward comes in notebook 08,
# so this forward runs under `no_grad`.

# %%
# %%px
def blocks(count=6):
    """The same blocks of 49,984 weights on every rank."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(models.Block(models.GPTConfig(dim=64)) for _ in range(count)))

plain, mine = blocks(), blocks()
for i, block in enumerate(mine):
    shard_unit(block, f"block {i}")
x = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(rank))

# %%
alive = predict("07.alive", "Six blocks, sharded on four ranks: how many are whole at one moment, at most?")
flops_guess = predict("07.flops", "How many FLOPs does one rank spend on a forward of its batch, compared with the unsharded model?",
                      choices=["a quarter", "the same", "four times as many"])

# %%
# %%px
seen = []
mine[0].mlp.up.register_forward_hook(lambda up, *_: seen.append((tuple(up.weight.shape), up.weight.untyped_storage().size())))
with record() as book, torch.no_grad():
    collectives.barrier()
    with ledger.mark("forward"):
        sharded_output = mine(x)
    whole_output = plain(x)

# %% tags=["nbval-check-output"]
# %%px
weight = mine[0].mlp.up.weight
print("same bits:", torch.equal(sharded_output, whole_output), "| in forward", *seen[0], "| after it", tuple(weight.shape),
      weight.untyped_storage().size())

# %% [markdown]
# The same bits on every rank. While block 0 computed, its weight had its full shape and the block's 199,936 bytes behind it (all weights
# of a block share one memory); now it has a shape and no memory at all. When was which block whole?

# %%
from fsdp_ref import viz

book = lab.run(lambda: collectives.gather_ledgers(book))[0].window("forward")
viz.weight_lifetimes(book)

# %% tags=["nbval-check-output"]
from dataclasses import replace

wholes = [a for a in book.allocations if a.rank == 0 and a.category == "unsharded parameter"]
block_bytes = 4 * (12 * 64**2 + 13 * 64)
alive.reveal(replace(book, allocations=wholes).peak_bytes(0) / block_bytes)

# %% [markdown]
# ## It is not model parallelism
#
# You may have heard that FSDP is model parallelism: each GPU computes its part of the layer. Count. Beside it, one matrix multiplication
# as **tensor parallelism** does it, where each rank really does compute with its own rows of the weight.

# %%
# %%px
from torch.utils.flop_counter import FlopCounterMode


def flops(run):
    """Floating-point operations of matrix multiplications in a call, on this rank."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return counter.get_total_flops()


# %%
# %%px
whole_flops, sharded_flops = flops(lambda: plain(x)), flops(lambda: mine(x))
weight = plain[0].mlp.up.weight                                             # (256, 64)
part = weight.chunk(world_size)[rank]                                       # (64, 64)

# %% tags=["nbval-check-output"]
# %%px
print(f"FLOPs of the six blocks, sharded over unsharded: {sharded_flops / whole_flops:g} | one multiplication:",
      f"with {tuple(weight.shape)} {flops(lambda: x @ weight.T):,}, with {tuple(part.shape)} {flops(lambda: x @ part.T):,}")

# %% tags=["nbval-check-output"]
whole_flops, sharded_flops = lab.run(lambda: (whole_flops, sharded_flops))[0]
flops_guess.reveal("the same" if whole_flops == sharded_flops else "a quarter" if sharded_flops < whole_flops else "four times as many")

# %% [markdown]
# Sharded, each rank does all FLOPs of its own batch, with whole weights: data parallelism that *stores* in parts. Tensor parallelism
# computes in parts: a quarter of the FLOPs a rank, but all ranks must have the same batch, and it is activations that travel.
#
# ## What the peak is made of
#
# Now the engine, and a whole GPT: blocks of B weights and a root unit of R (embeddings and the last norm, whole during the whole
# forward). `blocks_a_unit` says how many blocks share a unit.

# %%
def forward(blocks_a_unit):
    """One forward of a GPT whose blocks are grouped into units; everyone's ledger of it."""
    model = models.GPT(models.GPTConfig(dim=64, layers=8, context=32))
    for i in range(0, 8, blocks_a_unit):
        fully_shard(list(model.blocks)[i : i + blocks_a_unit])
    fully_shard(model)
    tokens = torch.randint(256, (2, 32))
    with record() as mine, torch.no_grad():
        collectives.barrier()
        with ledger.mark("forward"):
            model(tokens)
    return collectives.gather_ledgers(mine).window("forward")


# %% [markdown]
# Derive the peak of rank 0, with k blocks a unit, N = 4, fp32, no gradients:
#
# - the shards of everything: 4P/N bytes, P = 8B + R;
# - the root, whole: 4R;
# - the unit that computes, whole: 4kB;
# - and the buffer its slices arrived in, until they have been copied out: 4kB.
#
# Together 4P/N + 4R + 8kB. Only the first term has N in it. DDP would hold 4P, whole weights, and no more.

# %%
one_unit = predict("07.one_unit", "All 8 blocks in one unit: how many bytes a parameter at the peak of forward? (DDP: 4)", unit="bytes")
eight_units = predict("07.eight_units", "Each block a unit: how many?", unit="bytes")

# %% [markdown]
# **Change `CHOICES`** to any divisors of 8, and look at the last two columns.

# %% tags=["nbval-check-output"]
CHOICES = (1, 2, 4, 8)
B, R = 12 * 64**2 + 13 * 64, (256 + 32) * 64 + 2 * 64
P = 8 * B + R
peaks, books = {}, {}
for k in CHOICES:
    books[f"{k} a unit"] = lab.run(forward, k)[0]
    peaks[k] = books[f"{k} a unit"].peak_bytes(0)
    derived = 4 * P / 4 + 4 * R + 8 * k * B
    print(f"{k} block(s) a unit: derived {derived:,.0f} bytes, measured {peaks[k]:,}: {peaks[k] / P:.2f} bytes a parameter")
    assert peaks[k] == derived, "shards, root, unit and its buffer"

# %% tags=["nbval-check-output"]
if {1, 8} <= set(peaks):
    assert peaks[8] > 2 * 4 * P, "one unit holds more than twice DDP's weights"
    one_unit.reveal(round(peaks[8] / P, 2))
    eight_units.reveal(round(peaks[1] / P, 2))

# %% [markdown]
# You may have heard that memory falls to 1/N whatever one does. At rest, yes: one byte a parameter here. The *peak* with one big unit is
# more than twice what DDP holds, because the whole model is there, and its buffer too. It is the units that make FSDP save memory in
# forward.

# %%
viz.memory_over_step({name: books[name] for name in (f"{CHOICES[0]} a unit", f"{CHOICES[-1]} a unit")})

# %% [markdown]
# More ranks do not help a unit that is too big. The same formula for more ranks:

# %% tags=["nbval-check-output"]
for N in (4, 64, 1024):
    print(f"N = {N:4}: {(4 * P / N + 4 * R + 8 * B) / P:.2f} bytes a parameter with a block a unit,",
          f"{(4 * P / N + 4 * R + 8 * 8 * B) / P:.2f} with one unit")

# %% [markdown]
# What is left is the biggest unit. In a real model that is often the embedding: give it a unit of its own, and keep units alike. Too
# small is not good either: each unit is a message, and short messages are slow ([01](01_collectives.ipynb)). One block a unit is the
# usual choice.
#
# Buffers differ between implementations. The way by hand above had none, since its slices arrive in place; prefetching
# ([10](10_overlap_and_prefetch.ipynb)) adds a unit that is gathered ahead. Activations come on top in all of them.
#
# ## Where this lives in the source
#
# [`fsdp_ref/engine/unit.py`](../fsdp_ref/engine/unit.py): a unit and its states. `unshard` starts the gather, `wait_unshard` finishes it,
# so that something can happen in between.

# %%
read("engine/unit.py", "wait_unshard")

# %%
read("engine/unit.py", "reshard")

# %% [markdown]
# Its `_free_whole` does what the second function by hand did: `resize_(0)`. [`fsdp_ref/engine/hooks.py`](../fsdp_ref/engine/hooks.py) is
# *when*: `pre_forward` and `post_forward`.
#
# ## Check and quiz
#
# [The exercise](../exercises/release/fsdp_forward.ipynb): the two hooks. It is graded on lifetime, too: what is not freed, fails.

# %%
check("fsdp_forward")

# %%
ask("07")

# %% [markdown]
# ## What to take along
#
# - A unit is gathered before its forward and freed after it; its memory comes and goes, the tensors stay.
# - Every rank computes everything, with whole weights, on its own batch.
# - Peak = shards (the only part that shrinks with N) + biggest unit + its buffer + what stays whole, and activations.
# - After forward the weights are gone. How backward can work at all: [08](08_fsdp_backward.ipynb).
#
# **Papers:** Zhao et al., *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel*, sections 3.1 and 3.2.1; Rajbhandari et al.,
# *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, section 5.3; Shoeybi et al., *Megatron-LM*, section 3 (tensor
# parallelism).
