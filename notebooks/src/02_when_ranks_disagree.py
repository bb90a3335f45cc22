# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 02 · When ranks disagree
#
# **What happens when two ranks do not make the same calls, and how do you find the line?**
#
# Afterwards you can tell five kinds of disagreement by their reports, find the `if` that led the ranks apart, and explain why the worst
# kind raises no error at all.
#
# You need: notebooks 00 and 01 (ranks; all-reduce). Time: 25 minutes to read, about a minute to run: some of what follows has to wait for
# a time limit. Everything here goes wrong on purpose, and nothing hangs longer than 4 seconds.

# %% [markdown]
# ## Two ranks that agree
#
# A collective has no address. Gloo and NCCL match the calls of the ranks *by their order*: my third call belongs to your third call,
# whatever either of us meant. So all ranks must make the same calls in the same order. Here two ranks sum two gradients. (`%%px` runs
# a cell in every rank; `lab.run(f)` calls `f` in every rank and returns the results in rank order.)

# %%
from fsdp_ref.lab import RanksFailed, ask, changed, check, predict, read, start

lab = start(ranks=2, timeout=4, limit=30)

# %%
# %%px
from fsdp_ref.collectives import Label, all_reduce, barrier, check_calls

everyone, SUM = dist.group.WORLD, dist.ReduceOp.SUM


def gradients():
    """grad_a is 1 on rank 0 and 2 on rank 1 (sum 3), grad_b 10 and 20 (sum 30)."""
    return {"grad_a": torch.full((2,), 1.0 + rank), "grad_b": torch.full((2,), 10.0 * (1 + rank))}


# %% tags=["nbval-check-output"]
def in_order(names):
    """Sum the gradients in the order of `names`."""
    found = gradients()
    for name in names:
        all_reduce(found[name], everyone, Label(name, "backward"), op=SUM).wait()
    return {name: grad.tolist() for name, grad in found.items()}


lab.run(in_order, ["grad_a", "grad_b"])[0]

# %% [markdown]
# ## 1. Another order, in silence
#
# Rank 1 now takes the two the other way round, as it would when it loops over a `set` or over a dict filled in another order. Both
# tensors have the same size. The lab compares calls before it sends them; `check_calls(False)` turns that off, and leaves you with what
# bare PyTorch does.

# %%
swap = predict("02.swap", "Rank 1 sums grad_b before grad_a, unchecked. What happens?",
               choices=["it hangs until the time limit", "an error names the ranks", "wrong numbers, and no error"])


# %%
def swapped():
    """Sum the gradients, rank 1 in the other order."""
    barrier()  # both begin together, for the picture below
    with check_calls(False), record() as mine:
        sums = in_order(["grad_b", "grad_a"] if rank == 1 else ["grad_a", "grad_b"])
    return sums, collectives.gather_ledgers(mine)


# %% tags=["nbval-check-output"]
told = lab.run(swapped)
for number, (sums, _) in enumerate(told):
    print(f"rank {number}: {sums}   (right: 3 and 30)")
wrong = told[0][0]["grad_a"] == [21.0, 21.0]
swap.reveal("wrong numbers, and no error" if wrong else "an error names the ranks")

# %% [markdown]
# Rank 0's `grad_a` was added to rank 1's `grad_b`: 1 + 20 and 10 + 2. You may have heard that no error means correct. Measured: both ranks
# go on, without a warning, with numbers that could be gradients. A large model hides this for long, since its loss still falls.
#
# The ledger has what each rank believed it was doing. **See** the letters below: at the same place rank 0 says `grad_a` and rank 1 says
# `grad_b`.

# %%
from fsdp_ref import viz

viz.step_timeline(told[0][1])

# %% [markdown]
# ## 2. The same, checked
#
# Now with the check, as everywhere else in the lab. Before each collective every rank sends the others a **fingerprint**: 16 bytes that
# stand for operation, tensor, size, dtype, reduction and the number of the call. Only where all agree does the message itself go out.

# %%
def tell(cell, *arguments):
    """Run `cell` on the ranks; print the kind of the failure and the report."""
    try:
        lab.run(cell, *arguments)
    except RanksFailed as report:
        print(f"{report.diagnosis.kind}\n\n{report}")


# %% tags=["nbval-check-output"]
def swapped_and_checked():
    in_order(["grad_b", "grad_a"] if rank == 1 else ["grad_a", "grad_b"])


tell(swapped_and_checked)

# %% [markdown]
# Nothing was sent, every rank raised the same error, and the pool goes on with its variables. PyTorch's own debug mode
# (`TORCH_DISTRIBUTED_DEBUG=DETAIL`) compares operation, size and dtype, but not *which* tensor, so it does not see a swap.
#
# The check is not free. **Derive** its cost: each rank sends 16 bytes to each of n-1 others, so 16(n-1) bytes a collective: 16 here, 1008
# on 64 ranks. An all-reduce of 4 KiB sends 2(n-1)/n · 4096 = 4096 bytes here. Together 4112. Counted:

# %% tags=["nbval-check-output"]
def counted(checked):
    from fsdp_ref.lab.sent import sent_bytes
    with check_calls(checked), sent_bytes() as sent:
        all_reduce(torch.ones(1024), everyone, Label("x", "demo"), op=SUM).wait()
    return sum(sent)


print("unchecked:", lab.run(counted, False)[0], "bytes;  checked:", lab.run(counted, True)[0], "bytes")

# %% [markdown]
# ## 3. Whoever has the best loss saves
#
# `if loss < best: save()` looks harmless. But each rank has its own batch, so its own loss: the condition holds on some ranks only. The
# report reads the program and finds the line that led the ranks apart.

# %% tags=["nbval-check-output"]
def save_the_best():
    loss, best = torch.tensor(1.0 + rank), 1.5
    if loss < best:
        dist.barrier()  # saving begins with all ranks together
    dist.all_reduce(loss)


tell(save_the_best)

# %% [markdown]
# The cure is to decide on a number that is the same everywhere. What changed:

# %% tags=["nbval-check-output"]
def save_together():
    loss, best = torch.tensor(1.0 + rank), 1.5
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)  # one loss for all ranks: 1.5
    if loss <= best:
        dist.barrier()
    return loss.item()


print(lab.run(save_together))
changed(save_the_best, save_together)

# %% [markdown]
# ## 4. Saving is a rank-0 job?
#
# You may have heard that rank 0 saves and the others wait. That was true of whole models. Under FSDP each rank has its own shards, so
# saving needs all ranks. Here rank 0 tries it alone:

# %% tags=["nbval-check-output"]
def save_on_rank_0():
    model = fsdp_ref.fully_shard(torch.nn.Linear(4, 4))
    if rank == 0:
        checkpoint.save("checkpoints", step=1, model=model)
    dist.all_reduce(torch.ones(1))


tell(save_on_rank_0)

# %% [markdown]
# ## 5. An uneven last batch
#
# Rank 1 has one batch less, so it leaves the loop one round earlier. Its next call meets a call that is still inside the loop.

# %% tags=["nbval-check-output"]
def uneven():
    grad, count = torch.ones(2), torch.ones(1)
    for _ in range(3 - rank):
        dist.all_reduce(grad)
    dist.all_reduce(count)


tell(uneven)

# %% [markdown]
# ## 6. A rank that never comes
#
# Until now every rank came to *some* call, so the fingerprints could be compared at once. A rank that returns early comes to none. The
# others can only wait, until a time limit. Bare PyTorch has one as well. **How long** is it for gloo?

# %%
limit = predict("02.limit", "How long does a rank wait for a missing one in gloo, unless told otherwise?", unit="minutes")

# %%
from torch.distributed.constants import default_pg_timeout

limit.reveal(default_pg_timeout.total_seconds() / 60)

# %% [markdown]
# On 64 GPUs a hang of 30 minutes costs 32 GPU hours and ends in a message about a socket. This pool gives up after 4 seconds, asks where
# the missing rank is, and restarts. (The next cell takes ten seconds or so.)

# %%
def skip_bad_batches():
    loss = torch.tensor(float("nan") if rank == 1 else 1.0)
    if loss.isnan():
        return
    dist.all_reduce(loss)


try:
    lab.run(skip_bad_batches)
except RanksFailed as report:
    print(report)
    assert report.diagnosis.kind == "early exit" and report.diagnosis.ranks == (1,), "the report names another rank"

# %% [markdown]
# ## Can an interrupt save you?
#
# You may have heard that Ctrl-C, or the notebook's stop button, ends a hang. Rank 1 comes 2 seconds late to an all-reduce; rank 0 is
# interrupted after half a second. **When** does rank 0 notice?

# %%
stop = predict("02.stop", "A signal after 0.5 s, the other rank after 2 s: when does rank 0 notice?", unit="s")


# %%
def interrupted():
    """Seconds until this rank was interrupted; rank 1 comes 2 s late."""
    import time
    begin = time.monotonic()
    try:
        time.sleep(2 * rank)
        with collectives.check_calls(False):
            dist.all_reduce(torch.ones(1))
        time.sleep(1 - rank)
    except KeyboardInterrupt:
        return time.monotonic() - begin


# %%
import signal
import threading

threading.Timer(0.5, lab.kill, (0, signal.SIGINT)).start()
seconds = lab.run(interrupted)[0]
assert seconds > 1.5, "the interrupt got through to a blocked collective"
stop.reveal(round(seconds, 1))

# %% [markdown]
# The signal arrived at once and Python saw it only when the collective came back: the rank was waiting inside the library. With a rank
# that never comes, that is the time limit. So this notebook's kernel makes no collective itself: its stop button always works, and the
# pool kills ranks instead of asking them.

# %% [markdown]
# ## See what waiting looks like
#
# The same late rank as a timeline: rank 1 computes for 0.3 s before it comes. The hatched bar is rank 0, waiting; the black tick is the
# moment rank 1 came. A hang is this picture without the tick.

# %%
# %%px
from time import sleep

from fsdp_ref.collectives import Label, all_reduce, barrier


def late(seconds):
    barrier()
    with record() as mine, ledger.span(ledger.Lane.COMPUTE, "batch", "batch", "forward"):
        sleep(seconds * rank)
        all_reduce(torch.ones(1), dist.group.WORLD, Label("loss", "forward")).wait()
    return collectives.gather_ledgers(mine)


# %%
viz.step_timeline(lab.run(lambda: late(0.3))[0])

# %% [markdown]
# ## Experiment: make your own
#
# **Change** the line of `odd` and read what the report makes of it: `torch.ones(2 + rank)`; `op=dist.ReduceOp.MAX if rank else
# dist.ReduceOp.SUM`; `dist.broadcast(x, src=rank)`; a `raise` on one rank. Look at the first words, the kind, and at the line.

# %% tags=["nbval-check-output"]
def odd():
    x = torch.ones(2, dtype=torch.bfloat16 if rank == 1 else torch.float32)
    dist.all_reduce(x)


tell(odd)

# %% [markdown]
# ## In the source
#
# [fingerprint.py](../fsdp_ref/fingerprint.py) compares, [diagnosis.py](../fsdp_ref/diagnosis.py) and
# [catalogue.py](../fsdp_ref/catalogue.py) name what they find. The comparison itself is short:

# %%
read("fingerprint.py", "compare")

# %% [markdown]
# ## Check
#
# A training loop with a mistake: [name the line and mend it](../exercises/release/fix_the_disagreement.ipynb). The grader asks for the
# culprit first, and for the cure second.

# %%
check("fix_the_disagreement")

# %%
ask("02")

# %%
lab.stop()

# %% [markdown]
# ## What to take along
#
# - Collectives are matched by order. Same order, same tensors, same sizes, on every rank, or the result means nothing.
# - The dangerous mistakes raise nothing: another order of equal sizes gives wrong sums.
# - Whatever decides whether a collective is called must be decided by all ranks together.
# - A missing rank costs the others the time limit. Keep it short while you learn.
#
# In a script: `FSDP_REF_CHECK_CALLS=1` compares the calls of every rank, as here.
#
# **Next:** [03 · The memory ledger](03_the_memory_ledger.ipynb).
#
# **Papers:** Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, section 3.2.3 (why the order of buckets
# must be the same on all ranks).
