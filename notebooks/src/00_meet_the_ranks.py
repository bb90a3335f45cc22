# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 00 · Meet the ranks
#
# **What is a rank, what does it hold, and what is lost when one dies?**
#
# Afterwards you can start several ranks from a notebook, say what each of them holds under DDP and under ZeRO-3, read a timeline of
# their collectives, and continue a run that was killed, bit for bit.
#
# You need: Python, and a rough idea of how a neural network is trained. Time: 25 minutes to read, under a minute to run.
# Everything here is real: separate processes, real collectives, real crashes. No GPU is needed.
#
# Before an experiment the notebook asks for a **guess**. Type it, then run on: guess and measurement will stand side by side.

# %% [markdown]
# ## Four processes
#
# A **rank** is a process with a number. Data-parallel training runs the same program in every rank, each on its own part of the batch,
# and the ranks talk through **collectives**: operations that all of them call together.
#
# The notebook itself never takes part. It talks to four ranks that live beside it and keep their variables between cells. (The line it
# prints names the *backend* that carries messages: NCCL where each rank has a GPU of its own, else gloo.)

# %%
from fsdp_ref.lab import RanksFailed, Training, ask, changed, predict, read, start

lab = start(ranks=4, limit=60)

# %% [markdown]
# A cell that begins with `%%px` runs in every rank. Each has its own memory: here each makes a different number.

# %% tags=["nbval-check-output"]
# %%px
mine = torch.tensor([10.0 ** rank])
print(f"I am rank {rank} of {world_size}; my number is {mine.item():g}")

# %% [markdown]
# Next, every rank calls `all_reduce`, which adds the tensors of all ranks.

# %%
total = predict("00.sum", "Rank 2's number is 100. What is it after the all-reduce?")

# %% tags=["nbval-check-output"]
# %%px
dist.all_reduce(mine)
print(f"rank {rank}: {mine.item():g}")

# %% tags=["nbval-check-output"]
total.reveal(lab.run(lambda: mine.item(), ranks=[2])[0])

# %% [markdown]
# All four print 1111: after an all-reduce everyone holds the sum. And they really are other processes than this notebook:

# %% tags=["nbval-check-output"]
import os

pids = lab.run(os.getpid)
print(len({os.getpid(), *pids}), "different processes: this notebook and", len(pids), "ranks")

# %% [markdown]
# ## The same training, placed in two ways
#
# Training keeps weights, gradients and the optimizer's moments. **DDP** keeps all of them on every rank. **ZeRO-3** (what PyTorch
# calls FSDP) cuts each into slices, one a rank, and puts a layer's weights together only while it computes.
#
# The function below trains a small GPT on the bytes of some text and records what its rank did. It runs in the ranks, where `rank`,
# `world_size`, `torch`, `dist` and the parts of `fsdp_ref` (`models`, `data`, `record`, …) are there from the start.

# %%
def train(placements, text, steps=4, layers=3):
    """Train on this rank; return the losses and everyone's ledger."""
    torch.manual_seed(0)
    model = data_parallel(models.GPT(models.GPTConfig(dim=96, layers=layers, context=30)), placements)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = data.Loader(data.load(text), context=30, batch=16, rank=rank, ranks=world_size)
    with record(strategy=placements.name) as mine:
        losses = [one_step(model, optimizer, loader, f"step {step}") for step in range(steps)]
    return losses, collectives.gather_ledgers(mine)


# %%
def one_step(model, optimizer, loader, name):
    """Forward, backward, step; the mean loss over all ranks."""
    tokens, targets = map(torch.from_numpy, loader.next())
    collectives.barrier()  # so that the picture does not begin with ranks waiting for each other
    with ledger.mark(name):
        loss = model.loss(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean.item()


# %% [markdown]
# What changed from a step in one process to a step on four ranks? Nothing in the lines that train. A barrier and the mean of the
# losses are there for us to look at; what makes it parallel is `data_parallel(model, placements)` above.

# %%
def plain_step(model, optimizer, loader, name):
    """Forward, backward, step; the loss."""
    tokens, targets = map(torch.from_numpy, loader.next())
    with ledger.mark(name):
        loss = model.loss(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


changed(plain_step, one_step)

# %%
same = predict("00.losses", "Whole weights on every rank, or slices of them: will the losses differ?",
               choices=["by less than 1e-5", "a little more", "a lot"])
traffic = predict("00.traffic", "How many times as many bytes does ZeRO-3 send as DDP?", unit="times")

# %%
import asyncio
from pathlib import Path

from fsdp_ref import DDP, ZERO3

text = Path(asyncio.__file__).parent  # the source of one package of Python's library: half a megabyte
losses, ledgers = {}, {}
for placements in (DDP, ZERO3):
    losses[placements.name], ledgers[placements.name] = lab.run(train, placements, text)[0]

# %% tags=["nbval-check-output"]
gaps = [abs(ddp - zero3) for ddp, zero3 in zip(losses["DDP"], losses["ZeRO-3"], strict=True)]
assert losses["DDP"][-1] < losses["DDP"][0], "the training does not learn"
same.reveal("by less than 1e-5" if max(gaps) < 1e-5 else "a little more" if max(gaps) < 1e-2 else "a lot")

# %% [markdown]
# The same losses: sharding changes *where* numbers live, not *which* numbers are computed. (Each loss is the mean over four ranks.)

# %% [markdown]
# ## Picture 1: who holds what
#
# Below, each row is one parameter and each block the slice that one rank holds under ZeRO-3. Slices are cut by rows. Where the rows do
# not divide by four, the last slice is filled up with **padding** (hatched), so that all ranks send equally many bytes.

# %%
from fsdp_ref import viz

viz.shard_map(ledgers["ZeRO-3"], limit=12)

# %% [markdown]
# Every parameter is on all four ranks in parts, and whole on none. Under DDP each would be whole on all four, for instance:

# %% tags=["nbval-check-output"]
for name, book in ledgers.items():
    rows = sum(shard.rows for shard in book.shards if shard.name == "tokens.weight")
    print(f"{name}: the 256 rows of the embedding are held {rows // 256} time(s) in all")

# %% [markdown]
# ## Picture 2: what happens in one step
#
# One block of lanes a rank, time from left to right. A layer's weights are **all-gathered** before its forward, freed, gathered again
# before its backward, and its gradients are **reduce-scattered**: summed, each rank keeping its slice. Two reductions may be on their
# way together, so that lane has two rows. Hatched means *exposed*: the rank only waits. The black ticks say when the last rank came to
# a collective: before it, nobody can get anything. The dotted phase lines are those of rank 0.

# %%
step = ledgers["ZeRO-3"].window("step 3")
viz.step_timeline(step)

# %% [markdown]
# On a laptop all ranks share a few cores, so most communication is exposed: a rank waits until the slowest has come. The order of
# the gathers is what to look at. The ledger has it as text:

# %% tags=["nbval-check-output"]
gathers = [event.unit for event in step.events if event.lane == "all-gather" and event.rank == 0]
print("gathered on rank 0, in order:")
print(*gathers, sep=" → ")

# %% [markdown]
# Forward gathers the root (embeddings, last norm), then blocks 0, 1, 2. Backward gathers the root and block 2, then 1 *ahead of time*,
# then 0: that is prefetching. In forward, too, block 1 is asked for while block 0 still computes.

# %% [markdown]
# ## Picture 3: what it costs in memory
#
# Four bytes of weight, four of gradient and eight of Adam's moments: 16 bytes a parameter under DDP, on every rank. ZeRO-3 divides all
# of it by the number of ranks. On top come weights that are whole for a moment, and the buffers of collectives: a gather's, a
# reduction's, and under DDP a second copy of one layer's gradients while they are summed.

# %%
ratio = predict("00.peak", "Four ranks: how many times smaller is the highest point of ZeRO-3's memory?", unit="times")

# %%
viz.memory_over_step({name: book.window("step 3") for name, book in ledgers.items()})

# %%
parameters = 3 * (12 * 96**2 + 13 * 96) + (256 + 30) * 96 + 2 * 96
at_rest = {}
for name, book in ledgers.items():
    alive = [a.bytes for a in book.allocations if a.rank == 0 and a.end is None]
    at_rest[name] = sum(alive) / parameters
    print(f"{name}: between steps rank 0 holds {at_rest[name]:.2f} bytes a parameter")

# %%
assert abs(at_rest["DDP"] - 12) < 0.1, "DDP holds 4 + 8 bytes a parameter between steps, when there is no gradient"
assert abs(at_rest["ZeRO-3"] - 3) < 0.1, "ZeRO-3 holds a quarter of that"
peaks = {name: book.peak_bytes(0) for name, book in ledgers.items()}
print(f"the peaks: DDP {peaks['DDP'] / parameters:.1f}, ZeRO-3 {peaks['ZeRO-3'] / parameters:.1f} bytes a parameter")
assert 1.5 < peaks["DDP"] / peaks["ZeRO-3"] < 3, "the ratio of the peaks is not what the text says"
ratio.reveal(round(peaks["DDP"] / peaks["ZeRO-3"], 1))

# %% [markdown]
# The ratio is below 4 because buffers and whole layers do not shrink with the number of ranks. **Try it:** the more layers, the smaller
# the part of one layer. Change `layers` to 12 and look at where the ratio goes.

# %%
for layers in (3, 6):
    books = [lab.run(train, placements, text, 2, layers)[0][1] for placements in (DDP, ZERO3)]
    print(f"{layers} layers: the peak of ZeRO-3 is {books[0].peak_bytes(0) / books[1].peak_bytes(0):.2f} times smaller")

# %% [markdown]
# And the price in traffic? DDP sends each gradient twice, as a ring does (once to add up, once to hand out): 2 units. ZeRO-3 gathers each
# weight for forward and again for backward, and scatters each gradient: 3 units. On 4 ranks a unit is 3/4 of the weights' bytes.

# %% tags=["nbval-check-output"]
sent = {name: sum(event.wire_bytes for event in book.window("step 3").events if event.rank == 0) for name, book in ledgers.items()}
for name, nbytes in sent.items():
    print(f"{name}: rank 0 sends {nbytes / (4 * parameters * 3 / 4):.2f} units")
traffic.reveal(round(sent["ZeRO-3"] / sent["DDP"], 2))

# %% [markdown]
# 3 against 2, as the formulas say. `data_parallel(model, ZERO3, reshard_after_forward=None)` would keep the root and the last block
# whole between forward and backward, since backward begins with them: a little less traffic for a little more memory.

# %% [markdown]
# ## A rank dies
#
# Rank 2 is now killed with SIGKILL, as the system does when memory runs out. Bare PyTorch ends with a lost connection or, if the rank
# hangs rather than dies, waits: 30 minutes is its default for gloo. Here the pool notices, says who died, and starts afresh.

# %%
died = predict("00.died", "Rank 2 is killed. How many of the four ranks keep their variables?", unit="ranks")

# %%
lab.kill(2)
try:
    lab.run(lambda: dist.all_reduce(torch.ones(1)))
except RanksFailed as report:
    print(report)

# %% tags=["nbval-check-output"]
print("answers after healing:", lab.run(lambda: rank))
died.reveal(sum(lab.run(lambda: "mine" in globals())))

# %% [markdown]
# None: what a process group leaves behind after a failure cannot be trusted, so all four are new.
#
# ## A training run dies
#
# Losing variables is bearable in a notebook and terrible after a week of training, so runs save **checkpoints**. Next, the training
# command (its own processes, nothing to do with the pool) runs twice with the same seed: 50 steps, saved every 20. One of the two is
# killed outright after step 24, all its processes at once.

# %%
lab.stop()
import shutil
import tempfile

runs = Path(tempfile.mkdtemp(prefix="fsdp-ref-notebook-"))
options = dict(data=text, ranks=2, steps=50, save_every=20, dim=64, layers=2, context=32, dropout=0.1, eval_every=0, eval_windows=8)
undisturbed = Training(runs / "undisturbed", **options)
killed = Training(runs / "killed", **options).until_step(24)
print("processes of the run (a command and two ranks) before and after the kill:", killed.kill())

# %% tags=["nbval-check-output"]
print("checkpoints left:", [path.name for path in (runs / "killed" / "checkpoints").glob("step-????????")])

# %% [markdown]
# Everything after step 20 is lost. `--resume auto` goes on from there: weights, moments, learning rate, place in the text, and each
# rank's own random numbers (this run uses dropout).

# %%
resumed = Training(runs / "killed", **options, resume="auto").finish()
undisturbed = undisturbed.finish()

# %% tags=["nbval-check-output"]
equal = [resumed.losses()[step] == loss for step, loss in undisturbed.losses().items()]
print(f"{sum(equal)} of {len(equal)} losses have the same bits")
shutil.rmtree(runs)

# %% [markdown]
# Not *nearly* the same: the same bits, in all 50 steps, those before the kill and those after it. That is what "exact resume" means,
# and a test of this project checks it.

# %% [markdown]
# ## In the source
#
# The engine is short enough to read. [param.py](../fsdp_ref/engine/param.py) cuts one parameter into rows,
# [unit.py](../fsdp_ref/engine/unit.py) puts a layer's weights together and frees them, [hooks.py](../fsdp_ref/engine/hooks.py) says when.
# This is where a layer becomes whole:

# %%
read("engine/unit.py", "unshard")

# %% [markdown]
# ## Check
#
# The exercises begin with notebook 01; here are a few questions.

# %%
ask("00")

# %% [markdown]
# ## What to take along
#
# - A rank is a process; collectives are calls that all ranks make together; a rank that is missing stops the others.
# - DDP holds everything everywhere. ZeRO-3 holds a slice of everything, and a whole layer only while it computes.
# - The losses are the same; memory falls towards 1/N; traffic rises from 2 to at most 3.
# - A checkpoint must hold more than weights.
#
# **Next:** [01 · Collectives](01_collectives.ipynb). All notebooks: [the course](README.md).
#
# **Papers:** Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, sections 3 and 5 (memory),
# 7 (traffic); Zhao et al., *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel*, section 3.
