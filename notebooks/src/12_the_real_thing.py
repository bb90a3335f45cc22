# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 12 · The real thing
#
# **Is what you have built what PyTorch runs? And what would it take to train a model of 70 or 405 billion parameters with it?**
#
# Afterwards you can swap this engine for `torch.distributed.fsdp.fully_shard` and say what stays equal, wrap tied and frozen weights
# rightly, cut a cluster into groups that shard and groups that replicate, and plan a training before anybody rents a machine.
#
# You need: one step of ZeRO-3 (notebooks 07 to 09). Time: 35 minutes to read, under a minute to run.

# %%
from fsdp_ref import viz
from fsdp_ref.lab import ask, changed, predict, read, start

lab = start(ranks=4, limit=60)

# %% [markdown]
# ## Side by side
#
# Both are called alike: inner units first, then the root, then the optimizer. Both get the same seed and the same tokens. gloo adds round
# a ring and this engine in rank order, so for once it is told to use gloo's own collectives: then even the roundings are the same.

# %%
# %%px
def gpt():
    torch.manual_seed(0)
    return models.GPT(models.GPTConfig(dim=64, layers=3, context=32))

def batch(step):
    tokens = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(100 * step + rank))
    return tokens[:, :-1], tokens[:, 1:]

# %%
def with_ours():
    """A GPT, sharded by this engine."""
    from fsdp_ref import fully_shard
    model = gpt()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


# %%
def with_torch():
    """A GPT, sharded by PyTorch."""
    from torch.distributed.fsdp import fully_shard
    model = gpt()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


# %%
changed(with_torch, with_ours)

# %%
def one_step(model, optimizer, step):
    """Forward, backward, AdamW; the loss."""
    loss = model.loss(*batch(step))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# %%
def trained(build, steps=5):
    """Losses, this rank's weights, what went over the wire in the last step, and (of our engine) which unit it was for."""
    model, losses = build(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        with collectives.route("library"), contrast.Transcript() as wire, record() as book:
            losses.append(one_step(model, optimizer, step))
    named = [f"{e.unit} {e.phase}" for e in sorted(book.events, key=lambda e: e.sequence) if e.wire_bytes]
    return losses, torch.cat([p.to_local().flatten() for p in model.parameters()]), wire.rows, named


# %%
bits = predict("12.bits", "Five steps of AdamW with each. How many of the five losses have the same bits?", unit="losses")

# %%
ours, torchs = lab.run(trained, with_ours), lab.run(trained, with_torch)
bits.reveal(sum(a == b for a, b in zip(ours[0][0], torchs[0][0], strict=True)))

# %% tags=["nbval-check-output"]
print("the same bits in the losses of every rank:", all(a[0] == b[0] for a, b in zip(ours, torchs, strict=True)))
print("and in all weights after five steps:", all(bool((a[1] == b[1]).all()) for a, b in zip(ours, torchs, strict=True)))

# %% [markdown]
# Now what went over the wire in the last step. `contrast.Transcript` listens where torch dispatches operations, so it hears both libraries
# with the same ear:

# %% tags=["nbval-check-output"]
from fsdp_ref.viz.table import as_text

lines = [{"this engine": f"{a[0]} {a[1]:,}", "PyTorch": f"{b[0]} {b[1]:,}", "of": name}
         for a, b, name in zip(ours[0][2], torchs[0][2], ours[0][3], strict=True)]
print(as_text(lines))

# %% tags=["nbval-check-output"]
print("the same collectives, the same bytes, in the same order:", ours[0][2] == torchs[0][2])

# %% [markdown]
# The names differ, the idea is one: what is called `Unit` here is `FSDPParamGroup` there, and `param.py`, `unit.py`, `hooks.py` stand
# beside `_fsdp_param.py`, `_fsdp_param_group.py`, `_fsdp_state.py` in `torch/distributed/fsdp/_fully_shard`. For training on many GPUs
# take PyTorch's.

# %%
read("engine/api.py", "fully_shard")

# %% [markdown]
# ## Weights that are used twice
#
# Our GPT uses the embedding's matrix as its head too: *tied* weights. If the head becomes a unit of its own, two units would gather and
# reduce one matrix, and each would change it without the other.

# %%
def split_tie(shard):
    """Wrap the head alone although it shares its matrix; what happens, in the library's own words."""
    model = gpt()
    try:
        shard(model.head)
        shard(model)
        model.loss(*batch(0))
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# %%
def both_ways():
    """The same mistake with both libraries."""
    from torch.distributed import fsdp
    return split_tie(fully_shard), split_tie(fsdp.fully_shard)


here, there = lab.run(both_ways)[0]
print("PyTorch:", there)

# %% tags=["nbval-check-output"]
print("this engine:", here)

# %% [markdown]
# You may have heard that tied weights just work. They do in one unit: leave both to the root, or write `fully_shard([tokens, head])`.
# (PyTorch refuses the split from version 2.13 on: huggingface/accelerate#4171.) The tempting fix is to give the head a copy. It silences
# the error and trains another model:

# %% tags=["nbval-check-output"]
from fsdp_ref.models import GPTConfig

tied, untied = (GPTConfig(dim=64, layers=3, context=32, tied=tied).parameters() for tied in (True, False))
print(f"tied {tied:,} parameters, untied {untied:,}: {untied - tied:,} more, the 256 x 64 of the head")

# %% [markdown]
# ## Weights that are frozen
#
# Fine-tuning often freezes blocks. A frozen unit has no gradient to reduce and no moments. Does it still have to be gathered?

# %%
frozen = predict("12.frozen", "Block 1 of blocks 0, 1, 2 is frozen. Which of its three collectives in a step are left?",
                 choices=["none", "the gather of forward", "both gathers, no reduction", "all three"])

# %%
def collectives_of(names):
    """Unit -> its collectives in one step on rank 0, with the parameters frozen whose names begin with one of `names`."""
    model = gpt()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(names)))
    model = data_parallel(model, ZERO3)
    with record() as book:
        model.loss(*batch(0)).backward()
    found = [e for e in book.events if e.lane in ("all-gather", "reduce-scatter")]
    return {e.unit: ", ".join(f"{o.name} ({o.phase})" for o in found if o.unit == e.unit) for e in found}


# %%
middle = lab.run(collectives_of, ["blocks.1."])[0]
frozen.reveal({3: "all three", 2: frozen.choices[2], 1: frozen.choices[1]}[len(middle["blocks.1"].split(", "))])

# %% tags=["nbval-check-output"]
below = lab.run(collectives_of, ["tokens", "positions", "head", "blocks.0.", "blocks.1."])[0]
for title, found in (("block 1 frozen", middle), ("all below block 2 frozen", below)):
    print(title, *(f"  {unit:<9} {what}" for unit, what in found.items()), sep="\n")

# %% [markdown]
# A gradient on its way to block 0 is multiplied by block 1's weights. Only where nothing below learns does the second gather go. (In the
# second case block 1's is a prefetch in vain.) You may have heard that freezing and wrapping commute; units are what is gathered, so
# freeze whole ones.
#
# ## Shard inside, replicate across
#
# **HSDP** shards inside groups of $S$ ranks and keeps $R$ such groups as replicas. Gathers and reduce-scatters stay inside a group; then
# each rank's shard of the gradient is all-reduced across the groups.

# %%
across = predict("12.across", "HSDP on 2 x 2 ranks: how many times the weights does a rank send across groups in a step?", unit="times")

# %% [markdown]
# In units of the weights $P$ a rank sends:
#
# - ZeRO-3 on 4 ranks: $3 P \cdot \frac34 = 2.25 P$;
# - HSDP, $S = R = 2$: inside $3 P \cdot \frac12 = 1.5 P$; across, an all-reduce of the shard, $2 \cdot \frac P2 \cdot \frac12 = 0.5 P$.

# %%
def step_of(shape):
    """Everyone's ledger of one step: ZeRO-3, or HSDP on (replicas, shards)."""
    from torch.distributed.device_mesh import init_device_mesh
    mesh = shape and init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = data_parallel(gpt(), HSDP if shape else ZERO3, mesh)
    with record() as mine:
        model.loss(*batch(0)).backward()
    return collectives.gather_ledgers(mine)


# %%
books = {"ZeRO-3 on 4": lab.run(step_of, None)[0], "HSDP 2 x 2": lab.run(step_of, (2, 2))[0]}
viz.wire_by_stage(books)

# %%
def sent(name, lane):
    """Bytes that rank 0 sends in collectives of one kind, in weights of the model."""
    return sum(e.wire_bytes for e in books[name].events if e.rank == 0 and e.lane == lane) / (4 * tied)


across.reveal(sent("HSDP 2 x 2", "all-reduce"))

# %% tags=["nbval-check-output"]
for name in books:
    print(f"{name}: gathers and reduce-scatters send {sent(name, 'all-gather') + sent(name, 'reduce-scatter'):.2f} times the weights,",
          f"all-reduces across groups {sent(name, 'all-reduce'):.2f} times")

# %% [markdown]
# The price is memory: $16 / S$ bytes a parameter at rest instead of $16 / (R S)$.
#
# ## 70 billion parameters on eight GPUs?
#
# No ranks are needed any more. Weights, gradients and moments take 16 bytes a parameter: $70.6 \cdot 10^9 \cdot 16 = 1.13$ TB, over 8 GPUs
# 141 GB each, and an H100 has 85. From how many on does it fit, with one sequence of 8,192 tokens a GPU, activations recomputed, whole
# units and buffers counted?

# %%
lab.stop()
gpus = predict("12.gpus", "How many H100 does ZeRO-3 need for Llama 3.1 70B, in whole nodes of 8?", unit="GPUs")

# %%
from fsdp_ref.plan import advise, machine, memory, simulate

h100 = machine("h100")
options = dict(stage="zero3", micro_batch=1, sequence=8192, recompute="full")
fits = {count: memory("llama3.1-70b", gpus=count, **options).fits(h100.memory) for count in range(8, 65, 8)}
gpus.reveal(min(count for count, word in fits.items() if word == "yes"))

# %% tags=["nbval-check-output"]
print(fits)

# %%
print(memory("llama3.1-70b", gpus=8, **options))

# %% [markdown]
# What would the planner do with the eight GPUs? It weighs the strategies, says what it ruled out and why, and what would change the
# training:

# %%
print(advise("llama3.1-70b", "h100", batch=64, gpus=8))

# %% [markdown]
# ## 405 billion on 16,384
#
# The simulator runs the engine's own hooks as rank 0 of 16,384 ranks that do not exist. A batch of 16 million tokens leaves 1,024 for
# each.
#
# A ring of $n$ ranks takes $n - 1$ steps, however small the message: about 3.4 µs a step inside a node, 14 µs between nodes (NCCL's own
# figures). So one gather over all 16,384 takes $14336 \cdot 3.4 + 2047 \cdot 14$ µs $= 77$ ms before a byte counts, and there are 126
# blocks with two gathers and a reduction each: 29 s.

# %%
rings = predict("12.rings", "ZeRO-3 over all 16,384: which share of a step does a rank wait for collectives?", unit="%")

# %%
from fsdp_ref import HSDP

REPLICAS = 64                                                      # the number to change: 16, 256; look at the waiting and at the peak
options = dict(machine="h100", sequence=1024, recompute="full")
plans = {"ZeRO-3": simulate("llama3.1-405b", 16384, **options),
         "HSDP": simulate("llama3.1-405b", 16384, placements=HSDP, replicas=REPLICAS, **options)}
rings.reveal(100 * plans["ZeRO-3"].exposed / plans["ZeRO-3"].seconds)

# %% tags=["nbval-check-output"]
from fsdp_ref.plan import network

print(f"latency of a ring of 16,384: {1e3 * network.latency(h100, 16384):.0f} ms, of 256: {1e3 * network.latency(h100, 256):.1f} ms")
for name, plan in plans.items():
    print(f"{name}: step {plan.seconds:.0f} s, {100 * plan.exposed / plan.seconds:.0f} % of it waits; {plan.peak / 1e9:.0f} GB a rank")

# %%
viz.memory_over_step({name: plan.ledger.window("step") for name, plan in plans.items()})

# %% [markdown]
# The dark stripes are 126 blocks that come and go. Predictions from published figures; nothing here was measured on a GPU, and only rings
# are modelled (NCCL has trees, too). HSDP buys short rings with memory. Meta trained this model with tensor, context and pipeline
# parallelism beside FSDP. Under **tensor parallelism** a rank computes with a *part* of a weight and exchanges activations; under FSDP it
# gathers and computes with all of it.
#
# **Exercise:** [capstone](../exercises/release/capstone.ipynb): wrap a GPT within a budget of memory and one of bytes.
# <!-- TODO-MERGE check("capstone") -->

# %%
ask("12")

# %% [markdown]
# ## On real GPUs, on many machines
#
# Nothing changes in the code; with a GPU for each rank NCCL is used.
#
# ```
# torchrun --nproc-per-node 8 train.py                                                # one machine
# torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 train.py      # on both of two
# ```
#
# `fsdp-ref doctor` says what a machine will use and what is wrong with it. **Not** measured in this course: speed on GPUs, NVLink, compute
# that NCCL slows down, several machines.
#
# ## What to take along
#
# - One import line separates the two libraries; losses, weights, collectives and bytes are the same.
# - Tied weights belong into one unit. Frozen units are still gathered as long as something below them learns.
# - HSDP keeps most bytes inside a machine, for more memory.
# - 16 bytes a parameter, then whole units, buffers, activations: reckon first, rent afterwards.
#
# **In the source:** [`engine/api.py`](../fsdp_ref/engine/api.py), [`mesh.py`](../fsdp_ref/mesh.py), [`plan/`](../fsdp_ref/plan/advice.py),
# [plan.md](../docs/plan.md) (every figure with its source).
#
# **Papers:** Zhao et al., *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel*, section 3.2.2 (hybrid sharding); Press and
# Wolf, *Using the Output Embedding to Improve Language Models*, section 3 (tying); Llama Team, *The Llama 3 Herd of Models*, section 3.3
# (16,384 GPUs).
