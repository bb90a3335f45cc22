# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 01 · Collectives
#
# **What does each collective leave on every rank, and how many bytes does it cost?**
#
# Afterwards you can say what broadcast, all-gather, reduce-scatter and all-reduce do to four small tensors, build an all-reduce from sends
# and receives in two ways, and derive how many bytes each way sends.
#
# You need: notebook 00 (what a rank is, and `%%px`). Time: 25 minutes to read, under a minute to run. No GPU is needed.

# %% [markdown]
# ## Four collectives
#
# A **collective** is a call that all ranks of a group make together. FSDP needs three of them, and a fourth is handy. Each rank begins with
# four numbers: rank 0 has 1 2 3 4, rank 1 has 10 20 30 40, and so on, so that every sum shows what went into it.

# %%
from fsdp_ref.lab import ask, changed, check, predict, read, start

lab = start(ranks=4, limit=60)

# %% tags=["nbval-check-output"]
# %%px
from fsdp_ref.collectives import Label, all_gather, all_reduce, broadcast, reduce_scatter

everyone, SUM = dist.group.WORLD, dist.ReduceOp.SUM
mine = torch.tensor([1.0, 2.0, 3.0, 4.0]) * 10**rank
print(mine.long().tolist())

# %% [markdown]
# **Broadcast**: the tensor of one rank, on all. **All-gather**: the tensors of all ranks one after the other, on all. Each call carries a
# `Label`, which is what pictures and reports call it, and returns at once; `wait()` waits for the result.

# %% tags=["nbval-check-output"]
# %%px
got, gathered = mine.clone(), torch.empty(16)
broadcast(got, everyone, Label("got", "demo"), source=2)
all_gather(gathered, mine, everyone, Label("mine", "demo")).wait()
print("broadcast:", got.long().tolist(), "  all-gather:", gathered.long().tolist())

# %% [markdown]
# **Reduce-scatter** takes four numbers from each rank and leaves one on each. Which one?

# %%
scattered = predict("01.scatter", "What does rank 2 hold after a reduce-scatter with SUM?",
                    choices=["3, its own third number", "3333, the sum of all third numbers", "10, the sum of its own numbers"])

# %% tags=["nbval-check-output"]
# %%px
piece, total = torch.empty(1), mine.clone()
reduce_scatter(piece, mine, everyone, Label("mine", "demo"), op=SUM).wait()
all_reduce(total, everyone, Label("total", "demo"), op=SUM).wait()
print("reduce-scatter:", piece.long().tolist(), "  all-reduce:", total.long().tolist())

# %% tags=["nbval-check-output"]
held = lab.run(lambda: int(piece), ranks=[2])[0]
scattered.reveal({3333: "3333, the sum of all third numbers"}[held])

# %% [markdown]
# Rank r keeps the sum of everyone's number r. **All-reduce** leaves all four sums on every rank. Compare the two lines of rank 0: an
# all-reduce looks like a reduce-scatter whose four results were then all-gathered. Keep that in mind.

# %% [markdown]
# ## All-reduce from sends and receives
#
# The ranks stand in a ring. In each step every rank sends something to the next rank and receives from the one before. The simplest
# all-reduce passes whole tensors: after three steps each rank has seen all four.
#
# `lab.run(f)` calls `f` in every rank and returns the results in rank order. `f` finds what `%%px` cells find: `rank`, `world_size`,
# `torch`, `dist`, and the variables of that rank.

# %%
def pass_on(tensor, sent):
    """Send `tensor` to the next rank; return what the rank before sent. `sent` collects the bytes."""
    came = torch.empty_like(tensor)
    sending = dist.isend(tensor, (rank + 1) % world_size)
    dist.recv(came, (rank - 1) % world_size)
    sending.wait()
    sent.append(tensor.nbytes)
    return came


# %%
def whole_tensors(tensor):
    """The sum over all ranks, and the bytes this rank sent."""
    total, passing, sent = tensor.clone(), tensor, []
    for _ in range(world_size - 1):
        passing = pass_on(passing, sent)
        total += passing
    return total, sum(sent)


lab.run(lambda: whole_tensors(mine)[0].long().tolist())

# %% [markdown]
# It is right, and it is wasteful: a tensor of 1 MiB costs 3 MiB from each of four ranks, and the more ranks, the more each of them sends.

# %% tags=["nbval-check-output"]
def one_mib():
    """262144 random numbers of 4 bytes, others on every rank."""
    return torch.randn(2**18, generator=torch.Generator().manual_seed(rank))


print([whole / 2**20 for whole in lab.run(lambda: whole_tensors(one_mib())[1])], "MiB sent by each rank")

# %%
pieces = predict("01.bytes", "An all-reduce that cuts the same 1 MiB into four pieces: how much does each rank send?", unit="MiB")

# %% [markdown]
# ## In pieces
#
# Cut the tensor into as many pieces as there are ranks, and make rank r responsible for piece r. Step 1 is a reduce-scatter: each rank
# sends each piece to the rank responsible, which adds up. Step 2 is an all-gather: each sum goes to everyone.

# %%
def in_pieces(tensor):
    """The sum over all ranks, and the bytes this rank sent: a reduce-scatter, then an all-gather."""
    sent = []
    rows = tensor.view(world_size, -1)
    own = exchange(lambda other: rows[other], sent)  # everyone's row `rank`
    total = torch.zeros_like(own[0])
    for part in own:
        total += part
    return torch.cat(exchange(lambda other: total, sent)), sum(sent)


# %%
def exchange(message_for, sent):
    """Send `message_for(r)` to every other rank r; return what each rank had for this one, in rank order."""
    came = [torch.empty_like(message_for(rank)) for _ in range(world_size)]
    came[rank] = message_for(rank)
    others = [(rank + step) % world_size for step in range(1, world_size)]
    works = [dist.isend(message_for(other), other) for other in others]
    works += [dist.irecv(came[other], other) for other in others]
    for work in works:
        work.wait()
    sent += [message_for(other).nbytes for other in others]
    return came


# %% tags=["nbval-check-output"]
print(lab.run(lambda: in_pieces(mine)[0].long().tolist())[0])
in_mib = lab.run(lambda: in_pieces(one_mib())[1] / 2**20)
print(in_mib, "MiB sent by each rank")
pieces.reveal(in_mib[0])

# %% [markdown]
# ## The bytes, derived
#
# P bytes on n ranks; a piece has P/n bytes.
#
# - Reduce-scatter: each rank sends n-1 pieces, one to each other rank: (n-1)/n · P.
# - All-gather: each rank sends its sum to n-1 ranks: (n-1)/n · P.
# - All-reduce, both: 2(n-1)/n · P. Here 2 · 3/4 · 1 MiB = 1.5 MiB.
#
# Passing whole tensors costs (n-1) · P. On 64 ranks that is 63 P against 1.97 P: an all-reduce in pieces costs at most 2 P, however many
# ranks there are. The package's own collectives, counted where the bytes leave the rank:

# %% tags=["nbval-check-output"]
def counted():
    from fsdp_ref.lab.sent import sent_bytes
    x, out = one_mib(), torch.empty(2**18)
    with collectives.check_calls(False), sent_bytes() as sent:
        reduce_scatter(out[: 2**16], x, everyone, Label("x", "demo")).wait()
        scatter = sum(sent)
        all_gather(out, out[: 2**16].clone(), everyone, Label("x", "demo")).wait()
    return scatter / 2**20, sum(sent) / 2**20


assert lab.run(counted)[0] == (0.75, 1.5), "the formula of the text does not hold"
print("reduce-scatter 0.75 MiB, and with the all-gather 1.5 MiB: counted")

# %% [markdown]
# ## See it: a ring in pieces
#
# Sending to everybody at once needs a wire to everybody. A **ring** needs one to the next rank only and sends as many bytes: in every step
# a rank passes one piece on, with its own part added. Read one piece (a column) from picture to picture. Own part, partial sum and complete
# sum have colours of their own.

# %%
from fsdp_ref import viz

viz.ring("reduce-scatter", 4, nbytes=2**20)

# %% [markdown]
# In the next picture you choose the collective, the number of ranks and the step (without widgets it shows the start of an all-reduce).
# **Change** the number of ranks from 4 to 8: how much does each rank send in the last step, and in all?

# %%
from fsdp_ref.lab import explore

explore.ring("all-reduce", 4)

# %% [markdown]
# ## One primitive or two?
#
# You may have heard that all-reduce is the primitive and reduce-scatter something exotic. Next, the same random numbers are summed by the
# package's `all_reduce`, by its `reduce_scatter` followed by its `all_gather`, and by gloo's own all-reduce. **Will the sums be equal?**

# %%
halves = predict("01.bits", "all_reduce, and reduce_scatter then all_gather: equal?",
                 choices=["the same bits", "equal up to rounding", "different"])
gloo = predict("01.gloo", "The package's all_reduce, and gloo's: equal?", choices=["the same bits", "equal up to rounding", "different"])

# %%
def three_ways():
    """The same sum three ways."""
    one, x = one_mib(), one_mib()
    piece, two, three = torch.empty(2**16), torch.empty(2**18), one_mib()
    with record() as whole:
        all_reduce(one, everyone, Label("x", "demo"), op=SUM).wait()
    with record() as parts:
        reduce_scatter(piece, x, everyone, Label("x", "demo"), op=SUM).wait()
        all_gather(two, piece, everyone, Label("x", "demo")).wait()
    dist.all_reduce(three)
    return (one, two, three), collectives.gather_ledgers(whole), collectives.gather_ledgers(parts)


# %% tags=["nbval-check-output"]
(one, two, three), whole, parts = lab.run(three_ways)[0]


def compare(a, b):
    if (a == b).all():
        return "the same bits"
    return "equal up to rounding" if (a - b).abs().max() < 1e-5 else "different"


halves.reveal(compare(one, two))
gloo.reveal(compare(one, three))

# %% [markdown]
# All-reduce *is* a reduce-scatter and an all-gather: to the last bit, and to the last byte (below). Gloo adds in another order, and
# floating-point addition depends on the order: (a + b) + c need not be a + (b + c). So a difference of 1e-6 between two frameworks is no
# proof of a mistake, and equal bits are no accident: this package sums in rank order everywhere.

# %%
viz.wire_by_stage({"all-reduce": whole, "two halves": parts})

# %% [markdown]
# This is why ZeRO-2 can drop three quarters of the gradients for nothing: it stops after the first half. And why ZeRO-1 costs what DDP
# costs: it puts the optimizer's step between the two halves. Notebook 05 does both.

# %% [markdown]
# ## The same in the source
#
# The package sends directly, as `in_pieces` does: [wire.py](../fsdp_ref/wire.py). Rows go out to all ranks at once, and are added in
# rank order as they arrive.

# %%
read("wire.py", "reduce_scatter")

# %% [markdown]
# What changed from whole tensors to pieces:

# %%
changed(whole_tensors, in_pieces)

# %% [markdown]
# ## Experiment: latency
#
# A message costs the link's latency plus its bytes over the bandwidth. `emulate` slows the ranks down to such a link. **Change** `latency`
# to 0 and look at the small message: from which size on do bytes decide? (What this laptop cannot show is a real network's speed, nor
# NVLink's: times here are those of the emulated link.)

# %%
def seconds(kib, latency=0.02, bandwidth=32 * 2**20):
    """The best of three all-reduces of `kib` KiB, and what the link's formula says."""
    x, found = torch.ones(kib * 256), []
    for _ in range(3):
        with collectives.emulate(bandwidth, latency), record() as mine:
            all_reduce(x, everyone, Label("x", "demo")).wait()
        event = next(event for event in mine.events if event.lane == "all-reduce")
        found.append(event.seconds)
    return min(found), latency + event.wire_bytes / bandwidth


# %%
for kib in (1, 64, 1024, 4096):
    took, formula = lab.run(seconds, kib)[0]
    assert took >= formula, "the link was faster than its formula"
    print(f"{kib:5} KiB: {1000 * took:6.1f} ms measured, {1000 * formula:6.1f} ms by the formula")

# %% [markdown]
# Below some size the latency is all there is. That is why nobody reduces the gradient of each parameter by itself: notebook 04 puts them
# into buckets.

# %% [markdown]
# ## Check
#
# Now build the ring: [all-gather](../exercises/release/ring_all_gather.ipynb) and
# [reduce-scatter](../exercises/release/ring_reduce_scatter.ipynb), from sends and receives to the next rank alone. The grader looks at
# the values and at the bytes you send.

# %%
check("ring_all_gather")

# %%
check("ring_reduce_scatter")

# %%
ask("01")

# %%
lab.stop()

# %% [markdown]
# ## What to take along
#
# - All-gather: shards become the whole. Reduce-scatter: partial sums become shards of the sum. All-reduce: one after the other.
# - Each half sends (n-1)/n of the message from every rank, so an all-reduce never costs more than twice the message.
# - The order of a sum decides its last bits.
#
# **Next:** [02 · When ranks disagree](02_when_ranks_disagree.ipynb).
#
# **Papers:** Patarasuk and Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations*, section 3 (the ring);
# Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, section 7 (what the stages send).
