# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 03 · The memory ledger
#
# **Where does the memory of training go, and which part of it does sharding shrink?**
#
# Afterwards you can predict the bytes a parameter costs under each ZeRO stage and dtype, predict a block's activations, check both
# against a recording of real ranks, and say whether a model of 7 or 70 billion parameters fits.
#
# You need: notebook 00 (ranks; DDP and ZeRO-3 in outline). Time: 30 minutes to read, under a minute to run. No GPU is needed.

# %% [markdown]
# ## Four kinds of bytes
#
# Training holds **weights**, their **gradients**, the **optimizer's state** (AdamW: two moments a weight), and **activations**, the
# intermediate results that backward will need. A **ledger** is the list of all of them: which category, how many bytes, alive from when
# to when. The engine writes it while `record()` is on; with `activations=True` also what autograd saves.

# %%
from fsdp_ref.lab import ask, changed, check, predict, read, start

lab = start(ranks=2, limit=60)


# %%
def train(placements, batch=16, steps=2, policy=None, dtype=None):
    """Train a small GPT; everyone's ledger of the last step, and the dtype of Adam's moments."""
    torch.manual_seed(0)
    model = models.GPT(models.GPTConfig(dim=96, layers=3, context=30)).to(dtype)
    model = data_parallel(model, placements, mp_policy=policy or MixedPrecisionPolicy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        with record(activations=True) as mine:
            one_step(model, optimizer, torch.randint(256, (batch, 31)))
    moments = next(iter(optimizer.state.values()))["exp_avg"]
    return collectives.gather_ledgers(mine), str(moments.dtype)


# %%
def one_step(model, optimizer, tokens):
    """Forward, backward, step."""
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad()


# %% [markdown]
# What changed since notebook 00: a step records activations, and the dtypes can be chosen.

# %%
changed("00:train", train)

# %% [markdown]
# ## Sixteen bytes a parameter
#
# **Derive.** In fp32 a weight takes 4 bytes and its gradient 4. AdamW keeps two moments of 4 bytes each. 4 + 4 + 8 = 16. Under DDP every
# rank holds all of it. ZeRO shards first the moments, then the gradients, then the weights:
#
# | | weight | gradient | moments | on N ranks | N = 2 |
# |---|---|---|---|---|---|
# | DDP | 4 | 4 | 8 | 16 | 16 |
# | ZeRO-1 | 4 | 4 | 8/N | 8 + 8/N | ? |
# | ZeRO-2 | 4 | 4/N | 8/N | 4 + 12/N | ? |
# | ZeRO-3 | 4/N | 4/N | 8/N | 16/N | ? |

# %%
two = predict("03.zero2", "How many bytes a parameter does a rank hold under ZeRO-2 on two ranks?", unit="bytes")

# %%
from fsdp_ref.placements import DDP, ZERO1, ZERO2, ZERO3

books = {row.name: lab.run(train, row)[0][0] for row in (DDP, ZERO1, ZERO2, ZERO3)}

# %% [markdown]
# The moment to look at is when the optimizer begins: weights, gradients and moments all exist then.

# %%
from collections import Counter


def held(book, rank=0):
    """Bytes on `rank` by category when the optimizer begins."""
    moment = next(event.start for event in book.events if event.rank == rank and event.lane == "optimizer")
    bytes_of = Counter()
    for row in book.allocations:
        if row.rank == rank and row.start <= moment and (row.end is None or row.end > moment):
            bytes_of[str(row.category)] += row.bytes
    return bytes_of


# %%
PARAMETERS = 3 * (12 * 96**2 + 13 * 96) + (256 + 30) * 96 + 2 * 96
measured = {name: sum(held(book).values()) / PARAMETERS for name, book in books.items()}
for row in (DDP, ZERO1, ZERO2, ZERO3):
    formula = row.bytes_per_parameter(world_size=2)
    assert abs(measured[row.name] - formula) < 0.01 * formula, f"{row.name} does not hold what the table says"
    print(f"{row.name}: {formula:g} bytes a parameter by the table, {measured[row.name]:.2f} measured on rank 0")

# %%
two.reveal(round(measured["ZeRO-2"], 2))

# %% [markdown]
# The hundredth above the table is padding and Adam's step counters. **See** the same bytes by kind and rank. What is whole on a rank has
# another colour (and another letter) than what is a shard.

# %%
from fsdp_ref import viz

viz.held_by_stage(books)

# %% [markdown]
# ## Activations
#
# ZeRO-3 on N ranks cuts weights, gradients and moments to 1/N. You may have heard that it shards activations too.

# %%
shrink = predict("03.activations", "From DDP to ZeRO-3 on two ranks, same batch a rank: how many times smaller do activations get?",
                 unit="times")


# %%
def peak_of(book, category, rank=0):
    """The most bytes of one category that were alive at once."""
    rows = [row for row in book.allocations if row.rank == rank and row.category == category]
    moments = [row.start for row in rows]
    return max(sum(row.bytes for row in rows if row.start <= at and (row.end is None or row.end > at)) for at in moments)


activations = {name: peak_of(book, "activation") for name, book in books.items()}
print({name: f"{value / 2**20:.2f} MiB" for name, value in activations.items()})

# %% tags=["nbval-check-output"]
shrink.reveal(round(activations["DDP"] / activations["ZeRO-3"], 2))

# %% [markdown]
# Not at all. Each rank computes whole layers on its own part of the batch, so it keeps that part's intermediate results. FSDP is *data*
# parallelism: it splits what belongs to the model and leaves alone what belongs to the batch. **See** the activations (their letter is in
# the key) rise in forward and fall in backward, equally high in both panels.

# %%
viz.memory_over_step({name: books[name] for name in ("DDP", "ZeRO-3")})

# %% [markdown]
# ## A block's activations, derived
#
# T tokens (batch 16 × 30 = 480), width h = 96, 4 bytes a number. Autograd keeps of each block: the inputs of two norms (2 T·h numbers),
# of attention and MLP (2 T·h), queries, keys and values (3 T·h), attention's output (1 T·h), two of the MLP's inside, each four times as
# wide (8 T·h): 16 T·h numbers, 64 T·h bytes. Flash attention adds a number a head and token: 4 · 4 heads · T.
#
# 64 · 480 · 96 + 16 · 480 = 2,956,800 bytes, and a little for the norms' statistics (2 numbers a token and norm: 16 T = 7,680).

# %% tags=["nbval-check-output"]
saved = sum(row.bytes for row in books["ZeRO-3"].allocations if (row.rank, row.category, row.unit) == (0, "activation", "blocks.1"))
T, h = 480, 96
print(f"derived {64 * T * h + 16 * T + 16 * T:,} bytes, measured {saved:,} bytes")

# %% [markdown]
# ## Experiment: what grows with what
#
# **Change** `batch` below to 32 (or `layers` and `dim` in `train`). Look at which column grows with the batch and which one does not.

# %%
for batch in (4, 8, 16):
    book = lab.run(train, ZERO3, batch)[0][0]
    print(f"batch {batch:2}: activations {peak_of(book, 'activation') / 2**20:5.2f} MiB, "
          f"weights, gradients and moments {sum(held(book).values()) / 2**20:.2f} MiB")

# %% [markdown]
# That is why sharding alone does not rescue a long context or a large batch. Activation checkpointing does: it keeps a block's input
# only and computes the rest again in backward.

# %% [markdown]
# ## bfloat16 halves everything?
#
# A bf16 number takes 2 bytes. There are two ways to use it. A **policy** gathers and computes in bf16 and keeps shards, gradients' shards
# and moments in fp32. A **bf16 model** is bf16 from the start.

# %%
policy_bytes = predict("03.policy", "With the bf16 policy: how many bytes a parameter, all ranks together?", unit="bytes")
model_bytes = predict("03.bf16", "With a bf16 model: how many bytes a parameter, all ranks together?", unit="bytes")

# %%
import torch

from fsdp_ref import MixedPrecisionPolicy

bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
kinds = {"fp32": {}, "bf16 policy": {"policy": bf16}, "bf16 model": {"dtype": torch.bfloat16}}
for name, options in kinds.items():
    book, moments = lab.run(train, ZERO3, **options)[0]
    kinds[name] = 2 * sum(held(book).values()) / PARAMETERS, peak_of(book, "activation") / 2**20
    print(f"{name:12} {kinds[name][0]:5.2f} bytes a parameter over both ranks, activations {kinds[name][1]:.2f} MiB, moments {moments}")

# %% tags=["nbval-check-output"]
policy_bytes.reveal(round(kinds["bf16 policy"][0], 1))
model_bytes.reveal(round(kinds["bf16 model"][0], 1))

# %% [markdown]
# The policy saves nothing at rest: 16 bytes stay 16. It halves what is gathered and computed: activations, buffers, traffic. The bf16
# model halves all of it, and its moments became bf16 without a word: they have 8 bits of precision, and small updates are lost. You may
# have heard that a bf16 model brings an fp32 master copy along. It does not, unless you keep one: 2 + 2 + 4 (master) + 8 is 16 again.

# %% [markdown]
# ## Prediction and measurement, side by side
#
# The planner adds up such formulas for any model. Here is its prediction for our GPT under ZeRO-3, term by term, and the peak that the
# ledger measured. What no term explains is drawn too.

# %%
from fsdp_ref import models
from fsdp_ref.plan import memory, modules

shape = models.GPT(models.GPTConfig(dim=96, layers=3, context=30))
described = modules.describe(shape, (torch.zeros(1, 30, dtype=torch.long),), dtype=torch.float32)
forecast = memory(described, gpus=2, stage="zero3", dtypes="fp32", micro_batch=16, runtime=False)
peak = books["ZeRO-3"].peak_bytes(0)
assert 1 <= forecast.low / peak < 1.2, "the prediction is too low, or more than a fifth too high"
viz.waterfall({item.name: int(item.low) for item in forecast.items if item.low}, peak)

# %% [markdown]
# The prediction is a little high, by the bar called *unexplained*: it adds up all terms as if they were alive together. In this small
# model the peak falls at the beginning of backward, when activations are highest and no gradient has been reduced yet.
#
# ## What if: 7 and 70 billion parameters
#
# Formulas that were held against measurements may be asked about what cannot be run here. GPUs of 80 GB, one sequence of 4096 tokens a
# rank, activation checkpointing on. (Formulas, not measurements; `docs/plan.md` says what they leave out.)

# %%
need = predict("03.gpus", "Llama 2 70B under ZeRO-3: how many GPUs of 80 GB, in whole nodes of 8?", unit="GPUs")

# %% tags=["nbval-check-output"]
for model in ("llama2-7b", "llama2-70b"):
    for stage in ("ddp", "zero1", "zero2", "zero3"):
        found = [memory(model, gpus=gpus, stage=stage, recompute="full") for gpus in (8, 64)]
        told = [f"{each.low / 1e9:6.0f} GB a GPU ({'fits' if each.fits(80e9) == 'yes' else 'too much'})" for each in found]
        print(f"{model:10} {stage:5}   8 GPUs: {told[0]}   64 GPUs: {told[1]}")

# %% tags=["nbval-check-output"]
sizes = range(8, 129, 8)
need.reveal(next(n for n in sizes if memory("llama2-70b", gpus=n, stage="zero3", recompute="full").fits(80e9) == "yes"),
            how="calculated")

# %% [markdown]
# Under DDP more GPUs never help. Under ZeRO-3 they do, until what does not shrink is all that is left. Each line of this sum says how
# it was reckoned:

# %% tags=["nbval-check-output"]
print(memory("llama2-7b", gpus=8, stage="zero3", recompute="full"))

# %% [markdown]
# With the sliders you can ask yourself: **change** stage, GPUs, micro-batch, recompute and dtypes, and look at which line of the sum
# moves. (They need a running notebook.)

# %%
from fsdp_ref.plan import sliders

sliders("llama2-7b")

# %% [markdown]
# ## In the source
#
# A stage is a row of a table, not a class: [placements.py](../fsdp_ref/placements.py). The bytes follow from the row. What is entered
# into the books is in [ledger.py](../fsdp_ref/ledger.py), and the activations in [saved.py](../fsdp_ref/saved.py).

# %%
read("placements.py", "Placements.bytes_per_parameter")

# %% [markdown]
# ## Check
#
# Write the table as a function, for any stage and any dtypes: [bytes per parameter](../exercises/release/bytes_per_parameter.ipynb).

# %%
check("bytes_per_parameter")

# %%
ask("03")

# %%
lab.stop()

# %% [markdown]
# ## What to take along
#
# - fp32 with AdamW: 4 + 4 + 8 = 16 bytes a parameter. ZeRO divides the parts it shards by the number of ranks, and nothing else.
# - Activations belong to the batch. Sharding leaves them alone; checkpointing does not.
# - A bf16 policy saves nothing at rest; a bf16 model gives up precision for what it saves.
# - A prediction that hides its unexplained rest is worth little.
#
# What this notebook did not count: the process itself, Python, torch, and on a GPU the CUDA context and the allocator's fragmentation.
#
# **Next:** [04 · Data parallel from scratch](04_data_parallel_from_scratch.ipynb).
#
# **Papers:** Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, section 3.1 and figure 1 (16
# bytes, in mixed precision 2 + 2 + 12); Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, section 4.
