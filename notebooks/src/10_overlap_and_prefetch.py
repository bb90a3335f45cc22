# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10 · Overlap and prefetch
#
# **ZeRO-3 sends every weight twice a step. When does a rank wait for that, and when does it not?**
#
# Afterwards you can read the *exposed* communication of a step off a timeline, say how much of it a prefetch of 1 or 2 can hide on a given
# link and what that costs in memory, and reckon how many tokens a GPU must work on before its network is fast enough.
#
# You need: the order of gathers in forward and backward (notebooks 07 and 08). Time: 30 minutes to read, under a minute to run.

# %%
from fsdp_ref import viz
from fsdp_ref.lab import ask, changed, check, predict, read, start

lab = start(ranks=2, limit=60)

# %% [markdown]
# ## A link that is slow enough to see
#
# Between two processes of one laptop a gather is a copy in memory, over before it could hide behind anything. So two things are put in:
#
# - `collectives.emulate(bandwidth, latency)` keeps every collective on its way for as long as a modelled link would need, without using a
#   core;
# - each block *naps* 50 ms in forward and 100 ms in backward besides computing: like a GPU's work, that takes no CPU.
#
# Everything else is as always: real ranks, real collectives, the engine's own order.

# %%
FORWARD = 0.05                                                     # seconds a block naps in forward, half of what it does in backward
LAYERS, DIM = 6, 64
BLOCK = 4 * (12 * DIM**2 + 13 * DIM)                               # bytes of a block's weights


def link(ratio):
    """The bandwidth on which a block's gather takes `ratio` times its forward: a rank of two sends half of the bytes."""
    return BLOCK / 2 / (ratio * FORWARD)


print(f"0.8 forwards for a gather of {BLOCK / 1e3:.0f} kB: {link(0.8) / 1e6:.2f} MB/s; 2 forwards: {link(2) / 1e6:.2f} MB/s")

# %%
def on_demand(layers, dim, nap):
    """A GPT under ZeRO-3 whose units are gathered when they are needed."""
    from fsdp_ref.plan import compare
    return data_parallel(compare.gpt(dim, layers, nap), ZERO3, prefetch=0)


def ahead(layers, dim, nap, units):
    """A GPT under ZeRO-3 that gathers `units` units ahead in forward."""
    from fsdp_ref.plan import compare
    return data_parallel(compare.gpt(dim, layers, nap), ZERO3, prefetch=units)


# %%
def recorded(units, bandwidth, shape):
    """Everyone's ledger of one step on an emulated link, gathering `units` units ahead."""
    model, tokens = ahead(*shape, units) if units else on_demand(*shape), torch.zeros(4, 64, dtype=torch.int64)
    model(tokens).mean().backward()                                # the first forward teaches the order
    with collectives.emulate(bandwidth, 1e-4), record() as mine:
        collectives.barrier()
        with ledger.mark("step"):
            with ledger.mark("forward"):
                output = model(tokens).mean()
            output.backward()
    return collectives.gather_ledgers(mine)


# %% [markdown]
# ## Prefetch off, 1, 2
#
# A forward of $L = 6$ blocks, each taking $f$, with gathers that take $g = 0.8 f$. Without prefetch a block's gather begins when the block
# before is done: gather, compute, gather, compute, $L (g + f)$ in all, of which $L g$ is waiting.

# %%
left = predict("10.left", "Prefetch 1, gathers of 0.8 forwards. For how many of the six blocks' gathers in forward does a rank still wait?",
               unit="gathers")

# %% [markdown]
# With prefetch 1, block $i+1$ is on the wire while block $i$ computes. Only the first block's gather has nothing to hide behind: $g + L f$
# in all, if $g \le f$.

# %%
SHAPE = (LAYERS, DIM, FORWARD)
RATIO = 0.8                                                        # the number to change: 0.4, 1.2, and look at the two timelines
fast = {units: lab.run(recorded, units, link(RATIO), SHAPE)[0] for units in (0, 1, 2)}

viz.step_timeline(fast[0].window("forward"), ranks=[0])

# %% [markdown]
# Without prefetch the two lanes take turns: nothing is hidden, a rank waits as long as the link works. With prefetch 1:

# %%
viz.step_timeline(fast[1].window("forward"), ranks=[0])

# %%
def waited(book, ratio):
    """How many gathers' worth of time rank 0 waited for blocks in forward."""
    waits = [e for e in book.window("step").events if e.rank == 0 and e.lane == "wait" and e.phase == "forward"]
    return sum(e.seconds for e in waits if e.unit.startswith("blocks.")) / (ratio * FORWARD)


for units, book in fast.items():
    print(f"prefetch {units}: waited for {waited(book, RATIO):.1f} of {LAYERS} gathers in forward")
left.reveal(waited(fast[1], RATIO))

# %% tags=["nbval-check-output"]
def asked_early(book):
    """How many blocks' gathers were asked for before the block before them was done."""
    events = [e for e in book.window("forward").events if e.rank == 0 and e.unit.startswith("blocks.")]
    asked = {e.unit: e.start for e in events if e.lane == "all-gather"}
    done = {e.unit: e.end for e in events if e.lane == "compute"}
    return sum(asked[f"blocks.{i + 1}"] < done[f"blocks.{i}"] for i in range(LAYERS - 1))


print("asked for ahead, by prefetch:", {units: asked_early(book) for units, book in fast.items()})

# %% tags=["nbval-check-output"]
def sent(book):
    """Rank 0's collectives of the step, in an order of their own: kind, unit, phase, bytes."""
    return sorted((e.lane, e.unit, e.phase, e.wire_bytes) for e in book.window("step").events if e.rank == 0 and e.wire_bytes)


print(len(sent(fast[0])), "collectives; the same in all three:", sent(fast[0]) == sent(fast[1]) == sent(fast[2]))

# %% [markdown]
# You may have heard that prefetching computes more in parallel. Measured: the same collectives, the same bytes and the same compute, begun
# earlier. What runs beside compute is the *link*, which has nothing else to do.
#
# In backward the engine always gathers one unit ahead: the one that ran before, since its turn is next. That order is known from forward.
# Forward's own order is known from the *last* forward, and only as long as this one goes the same way:

# %%
read("engine/schedule.py", "Schedule.following")

# %% [markdown]
# ## What it costs
#
# A gather on its way holds a buffer of a whole unit until it is copied out. Without prefetch a rank has at most that buffer and the
# weights it is copied into: two units. With one gather ahead it has a block that computes and one buffer: two units again, so prefetch 1
# costs nothing at the peak. With two gathers ahead it is three. Counted in blocks of 200 kB:

# %%
memory = predict("10.memory", "Prefetch 2 instead of none: how many blocks' weights does a rank hold more at the peak of forward?",
                 unit="blocks")

# %%
peaks = {units: book.window("forward").peak_bytes(0) / BLOCK for units, book in fast.items()}
memory.reveal(peaks[2] - peaks[0])

# %% tags=["nbval-check-output"]
print(*(f"prefetch {units}: {peak - peaks[0]:+.2f} blocks beside no prefetch" for units, peak in peaks.items()), sep="\n")

# %%
viz.memory_over_step({f"prefetch {units}": fast[units].window("forward") for units in (0, 2)})

# %% [markdown]
# So overlap is not free: it is paid in buffers, a unit each. `set_max_gathers_in_flight` bounds them. On a GPU there is one more price:
# NCCL's kernels take some of the processors that compute would use. A laptop cannot show that; here the link is a thread that sleeps.

# %% [markdown]
# ## When the link is too slow
#
# Now a gather takes *twice* a forward. Behind each block's compute hides only $f$ of its $g = 2f$; the link is never idle, so a forward
# cannot be shorter than $L g$. Of the gathers' time, $g + (L - 1)(g - f) = 7 f$ stays exposed: 3.5 gathers.

# %%
slower = predict("10.slower", "A link on which a gather takes two forwards. How many gathers' worth of waiting does prefetch 2 save beside "
                 "prefetch 1?", unit="gathers")

# %%
slow = {units: lab.run(recorded, units, link(2), SHAPE)[0] for units in (1, 2)}
for units, book in slow.items():
    print(f"prefetch {units}: waited for {waited(book, 2):.1f} of {LAYERS} gathers in forward; 3.5 were expected")
slower.reveal(waited(slow[1], 2) - waited(slow[2], 2))

# %%
seconds = [book.window("forward").end - book.window("forward").start for book in slow.values()]
assert min(seconds) > 0.98 * LAYERS * 2 * FORWARD, "no forward is shorter than its six gathers, however much is prefetched"

# %% [markdown]
# One gather ahead already keeps the link busy; a second closes the gaps between gathers. (A little less than 3.5 is waited for because a
# forward takes a little more than its nap.) A second ahead helps where units are *unequal*: a small one computes too briefly to hide a
# large one.
#
# **Exercise:** [forward_prefetch](../exercises/release/forward_prefetch.ipynb): write the prefetch, within a bound on memory.

# %%
check("forward_prefetch")

# %% [markdown]
# ## The simulator beside the measurement
#
# `plan.simulate` runs the engine's own hooks on tensors without numbers, and gives each event a time: compute from one recorded step,
# collectives from the link. Order, bytes and allocations are the engine's; only times can be wrong. It learns from **one** step (prefetch
# off, the faster link) and predicts others:

# %%
import torch

from fsdp_ref.plan import compare, costs, simulate

learned = [costs.from_ledger(fast[0].window("step"), rank) for rank in (0, 1)]


def predicted(units, ratio):
    """The simulator's step of rank 0."""
    return simulate(lambda: compare.gpt(DIM, LAYERS), 2, costs=learned[0], peers=learned[1:], prefetch=units,
                    link=(link(ratio), 1e-4), inputs=torch.zeros(4, 64, dtype=torch.int64))


# %%
from fsdp_ref.viz.table import as_text

rows, found = [], {}
for ratio, units, book in ((RATIO, 0, fast[0]), (RATIO, 1, fast[1]), (2, 1, slow[1])):
    now, step = predicted(units, ratio), book.window("step")
    found[ratio, units] = now.ledger
    rows.append({"gather / forward": ratio, "prefetch": units, "waited s, predicted": now.exposed, "waited s": compare.waited(step),
                 "step s, predicted": now.seconds, "step s": step.end - step.start})
print(as_text(rows))

# %% tags=["nbval-check-output"]
def order(book):
    """The collectives of rank 0's step, in the order in which they were begun."""
    return [(e.lane, e.unit, e.phase) for e in sorted(book.window("step").events, key=lambda e: e.sequence) if e.rank == 0 and e.wire_bytes]


print("the same order as on real ranks:", order(found[RATIO, 1]) == order(fast[1]) and order(found[RATIO, 0]) == order(fast[0]))

# %% [markdown]
# ## How many tokens hide a network?
#
# With a way to predict we can ask about machines nobody here has. A block of $B$ parameters in bf16: its gather moves about $2B$ bytes at
# $W$ bytes/s, its forward over $t$ tokens takes $2 B t$ FLOP at $R$ FLOP/s. They are equal at
#
# $$t^* = R / W,$$
#
# whatever the size of the block: a number of *tokens a GPU*. Backward carries three times the bytes (a gather, and a reduction in fp32)
# over twice the compute, so it needs $1.5\, t^*$.

# %%
from fsdp_ref.plan import machine, network
from fsdp_ref.plan.speed import KERNELS

h100 = machine("h100")
R, W = h100.flops * h100.matmul * KERNELS, network.bandwidth(h100, 64)
print(f"64 H100: R = {R:.3g} FLOP/s, W = {W:.3g} bytes/s, t* = {R / W:,.0f} tokens, in backward {1.5 * R / W:,.0f}")

# %%
steps = {tokens: simulate("llama3.1-8b", 64, machine="h100", sequence=tokens) for tokens in (512, 1024, 2048, 4096)}
for tokens, found in steps.items():
    print(f"{tokens:>5} tokens a GPU: {100 * found.exposed / found.seconds:3.0f} % of the step waits for collectives")

# %% tags=["nbval-check-output"]
share = {tokens: found.exposed / found.seconds for tokens, found in steps.items()}
print("512 tokens leave more than half of the step exposed:", share[512] > 0.5, "  4096 leave little:", share[4096] < 0.1)

# %% [markdown]
# These are predictions from published figures (`print(h100)` names each with its source), not measurements: no GPU was used. On a GPU the
# host runs ahead of the device, so even a gather that nobody asked for early is queued early; there the number of *buffers* decides, not
# `prefetch`. What the simulator leaves out it says: stragglers, contention, kernels slowed down by communication.

# %% [markdown]
# ## What changed
#
# One argument:

# %%
changed(on_demand, ahead)

# %%
ask("10")

# %% [markdown]
# ## What to take along
#
# - Exposed time is what counts, not communication time.
# - Prefetch 1 hides $\min(f, g)$ of every gather but the first; a link that is slower than compute stays slower.
# - It sends the same bytes and computes the same; it pays with buffers.
# - Tokens a GPU, $R/W$, decide whether a network can be hidden.
#
# **In the source:** [`engine/schedule.py`](../fsdp_ref/engine/schedule.py), [`wire.py`](../fsdp_ref/wire.py) (the emulated link),
# [`plan/simulator.py`](../fsdp_ref/plan/simulator.py), [`viz/overlap.py`](../fsdp_ref/viz/overlap.py) (what "exposed" means).
#
# **Papers:** Zhao et al., *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel*, sections 3.3 (overlap, prefetching) and 3.4
# (the rate limiter); Rajbhandari et al., *ZeRO-Infinity*, section 4 (how much bandwidth a step needs); Zhang et al., *SimpleFSDP: Simpler
# Fully Sharded Data Parallel with torch.compile* (a compiler that reorders).
