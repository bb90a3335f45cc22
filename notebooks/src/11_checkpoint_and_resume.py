# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 11 · Checkpoint and resume
#
# **What must be saved so that a run that died goes on as if it had not, bit for bit, also on fewer machines?**
#
# Afterwards you can list the parts of a checkpoint and say what each omission breaks, explain why a kill in the middle of a save costs
# nothing but that save, continue a run of four ranks on two and on three, and hand the weights to other tools.
#
# You need: what a rank holds under ZeRO-3 (notebooks 00 and 06). Time: 35 minutes to read, under a minute to run.

# %%
import asyncio
import shutil
import tempfile
from pathlib import Path

from fsdp_ref import checkpoint, viz
from fsdp_ref.lab import RanksFailed, ask, changed, check, predict, read, start

text = Path(asyncio.__file__).parent                               # half a megabyte of source to train on
runs = Path(tempfile.mkdtemp(prefix="fsdp-ref-notebook-"))
lab = start(ranks=4, limit=60)

# %% [markdown]
# ## A run with everything in it
#
# A GPT with dropout, AdamW, a learning rate that warms up, and a loader with a place in the text. Each of them has state that the next
# step depends on.

# %%
def build(text, dropout=0.1):
    """The parts of a run on this rank, as a fresh process makes them."""
    torch.manual_seed(0)
    model = data_parallel(models.GPT(models.GPTConfig(dim=64, layers=2, context=32, dropout=dropout)), ZERO3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 8))
    loader = data.Loader(data.load(text), context=32, batch=12, rank=rank, ranks=world_size)
    torch.manual_seed(100 + rank)                                  # from here on: dropout, another stream on each rank
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}


# %%
def steps(run, first, last):
    """Train steps `first` to `last`; step -> the mean loss over the ranks."""
    losses = {}
    for step in range(first, last + 1):
        loss = run["model"].loss(*map(torch.from_numpy, run["loader"].next()))
        loss.backward()
        for part in ("optimizer", "scheduler"):
            run[part].step()
        run["optimizer"].zero_grad()
        dist.all_reduce(mean := loss.detach().clone(), op=dist.ReduceOp.AVG)
        losses[step] = mean.item()
    return losses


# %%
def whole(text, folder, dropout=0.1):
    """Twelve steps in one go; a checkpoint is saved after the sixth, on the way."""
    run = build(text, dropout)
    losses = steps(run, 1, 6)
    checkpoint.save(folder, step=6, **run)
    return losses | steps(run, 7, 12)


undisturbed = lab.run(whole, text, runs / "a")[0]
print(*(f"{loss:.3f}" for loss in undisturbed.values()))

# %% [markdown]
# ## How large is it?

# %%
size = predict("11.size", "Weights and Adam's moments together: how many times the bytes of the weights alone?", unit="times")

# %% [markdown]
# fp32 weights take 4 bytes a parameter, Adam's two moments 8: with $P$ parameters $4P + 8P = 12 P$ bytes, cut over the ranks without a
# byte held twice. The rest (random states, the place in the text, a manifest) is small in any model that is not a toy.

# %%
step_6 = checkpoint.latest(runs / "a")
files = {path.name: path.stat().st_size for path in sorted(step_6.iterdir())}
total = {kind: sum(count for name, count in files.items() if name.startswith(kind)) for kind in ("model", "optimizer", "rank", "manifest")}
size.reveal((total["model"] + total["optimizer"]) / total["model"])

# %% tags=["nbval-check-output"]
from fsdp_ref.models import GPTConfig

P = GPTConfig(dim=64, layers=2, context=32).parameters()
print(*files, sep="\n")
print("weights and moments take 12 bytes a parameter, within 10 %:", abs((total["model"] + total["optimizer"]) / (12 * P) - 1) < 0.1)

# %% [markdown]
# One file of weights, one of moments and one of random state *a rank*. You may have heard that saving is rank 0's job: under ZeRO-3 rank 0
# has a quarter of the weights. Saving is a **collective**: every rank writes what it holds, all vote, one rename makes it real. What if
# only rank 0 is asked?

# %%
def only_rank_0(text, folder):
    """A habit from scripts with one GPU."""
    run = build(text)
    if rank == 0:
        checkpoint.save(folder, step=0, **run)
    dist.barrier()                                                 # "now it is saved; all go on together"


try:
    lab.run(only_rank_0, text, runs / "rank-0")
except RanksFailed as report:
    print(report)

# %% [markdown]
# Rank 0 waits in the save for votes, the others wait in the barrier for rank 0. Here the calls are compared before anything is sent; bare
# PyTorch waits, 30 minutes by default on gloo.
#
# **Exercise:** [sharded_save](../exercises/release/sharded_save.ipynb): write the save.

# %%
check("sharded_save")

# %% [markdown]
# ## Leave one thing out
#
# A resumed run must print the same losses, not similar ones. It is resumed from step 6 five times: with everything, and with one part left
# as a fresh process makes it.

# %%
first = predict("11.first", "Four omissions: moments, random state, place in the text, schedule. How many of them already change the "
                "first loss after the resume?", unit="omissions")

# %%
def resumed(text, folder, without):
    """Steps 7 to 12 of fresh parts that are loaded from step 6, but for one."""
    run = build(text)
    fresh = torch.get_rng_state()
    report = checkpoint.load(folder, **{name: part for name, part in run.items() if name != without})
    if without == "random state":
        torch.set_rng_state(fresh)
    if without in ("optimizer", "scheduler"):                      # the optimizer's groups hold the rate as well: the scheduler's counts
        run["optimizer"].param_groups[0]["lr"] = run["scheduler"].get_last_lr()[0]
    return steps(run, report.step + 1, 12)


# %%
omissions = ("nothing", "optimizer", "random state", "loader", "scheduler")
after = {without: lab.run(resumed, text, runs / "a", without)[0] for without in omissions}
differs = {without: [step for step, loss in losses.items() if loss != undisturbed[step]] for without, losses in after.items()}
first.reveal(sum(7 in found for found in differs.values()))

# %% tags=["nbval-check-output"]
for without, found in differs.items():
    print(f"without {without:<13}", f"losses differ from step {found[0]} on" if found else "all bits equal")

# %% [markdown]
# Two of them hide for a step: the loss of step 7 is computed *before* the optimizer moves, so missing moments and a wrong rate show at
# step 8. A test that compares one loss after the resume would pass both. What missing moments do:

# %%
before = {step: undisturbed[step] for step in range(1, 7)}
viz.resume_strip(undisturbed, before, after["optimizer"], saved=6)

# %% [markdown]
# Nobody would notice: the loss goes on falling. But it is another run. (You may have heard that a checkpoint *is* the weights.)
#
# **Exercise:** [exact_resume](../exercises/release/exact_resume.ipynb).

# %%
check("exact_resume")

# %% [markdown]
# ## Killed in the middle of a save
#
# Every rank has written its files of step 9. Rank 0, which is to publish them, is killed with SIGKILL before it can.

# %%
killed = predict("11.killed", "What is in the folder afterwards?",
                 choices=["step 6, whole; of step 9 nothing that counts", "step 9 with a piece missing", "nothing that can be loaded"])

# %%
def die_in_save(text, folder):
    """Go on from step 6 and save step 9, in which rank 0 dies once its files are written."""
    import os

    from fsdp_ref.checkpoint import commit
    run = build(text)
    checkpoint.load(folder, **run)
    steps(run, 7, 9)
    if rank == 0:
        commit.Commit.commit = lambda *_: os.kill(os.getpid(), 9)
    checkpoint.save(folder, step=9, **run)


# %%
try:
    lab.run(die_in_save, text, runs / "a")
except RanksFailed as report:
    print(report)

# %%
names = sorted(path.name for path in (runs / "a").iterdir() if path.is_dir())
newest = checkpoint.latest(runs / "a")
checkpoint.verify(newest)                                          # reads every byte; raises if one is wrong
killed.reveal(killed.choices[0 if newest.name == "step-00000006" else 1])

# %% tags=["nbval-check-output"]
print(*(name[:18] + "..." * (len(name) > 18) for name in names), sep="\n")

# %% [markdown]
# Files are written under a temporary name, flushed, and counted; only when every rank has voted is the folder *renamed*, and a rename
# happens or does not. Whoever looks for checkpoints sees only final names:

# %%
read("checkpoint/commit.py", "Commit.run")

# %% [markdown]
# The pool has four new ranks. They resume from what is left:

# %%
again = lab.run(resumed, text, runs / "a", "nothing")[0]
viz.resume_strip(undisturbed, {step: undisturbed[step] for step in range(1, 10)}, again, saved=6)

# %% tags=["nbval-check-output"]
print("bit-equal in steps 7 to 12:", all(again[step] == undisturbed[step] for step in range(7, 13)))

# %% [markdown]
# ## Four ranks, then two, then three
#
# Machines are taken away and come back. A scheduler says so with SIGTERM, to one of them or to all, and kills some seconds later. A
# signal handler may run in the middle of anything, so here it only sets a flag; after every step the ranks ask each other whether anyone
# has heard it (`stop.agreed()`, an all-reduce of one number). Then all save after the same step.

# %%
def be_asked():
    """What a scheduler would do."""
    import signal
    signal.raise_signal(signal.SIGTERM)


# %%
def until_asked(text, folder, signal_in=None):
    """Go on from the newest checkpoint to step 12, or until any rank is asked to stop: here the last, in step `signal_in`."""
    run, losses = build(text, dropout=0), {}
    step = checkpoint.load(folder, **run).step
    with preemption.watch() as stop:
        while step < 12 and not stop.agreed():
            step += 1
            if step == signal_in and rank == world_size - 1:
                be_asked()
            losses |= steps(run, step, step)
    checkpoint.save(folder, step=step, **run)
    return losses


# %% [markdown]
# Four ranks save step 6 and go on to step 12: that is what to compare with. Two ranks take up step 6, and the second of them hears the
# signal in step 9; three ranks take up what is there. The batch of 12 windows is the same whoever shares it.

# %%
alone, together = lab.run(whole, text, runs / "b", 0)[0], {}
for ranks, signal_in in ((2, 9), (3, None)):
    lab.stop()
    lab = start(ranks=ranks, limit=60)
    losses = lab.run(until_asked, text, runs / "b", signal_in)[0]
    together |= losses
    print(f"{ranks} ranks: steps {min(losses)} to {max(losses)}, then saved as {checkpoint.latest(runs / 'b').name}")

# %%
most = max(abs(loss - alone[step]) for step, loss in together.items())
print(f"the largest difference to the run that was left alone: {most:.1e}")

# %% tags=["nbval-check-output"]
from fsdp_ref import preemption

print("every step once:", sorted(together) == list(range(7, 13)), "  the same losses, to 1e-4:", most < 1e-4)
print("the training command does the same, and ends with exit code", preemption.EXIT_CODE)

# %% [markdown]
# ## How often?
#
# A save that stops training for $\delta$ seconds every $\tau$ wastes $\delta / \tau$; a failure every $M$ loses $\tau / 2$ on average, so
# $\tau / 2M$. The sum is least at $\tau = \sqrt{2 \delta M}$ (Young): for $\delta = 5$ s and one failure in three hours $\sqrt{2 \cdot 5
# \cdot 10800} = 329$ s. Trying all intervals finds the same:

# %% tags=["nbval-check-output"]
from fsdp_ref import interval

wasted = {seconds: 5 / seconds + seconds / (2 * 10800) for seconds in range(20, 2000)}
best = min(wasted, key=wasted.get)
print(f"least waste at {best} s: {100 * wasted[best]:.1f} %; Young's formula: {interval.young(5, 10800):.0f} s")

# %% [markdown]
# ## Which rows does a rank want?
#
# Not bit for bit after 4, 2 and 3 ranks: four ranks add up other partial sums than two. You may have heard that a sharded checkpoint loads
# on any number of ranks by itself. It does if the *loader* knows which rows each file holds. With 256 rows of embedding, four files hold
# 64 each and three ranks want 86, 86 and 84:

# %%
from fsdp_ref.report import saved_tensors

tensors = saved_tensors(runs / "a", load_on=3)
viz.checkpoint_map([tensor for tensor in tensors if tensor.name in ("tokens.weight", "positions.weight", "norm.weight")])

# %%
table = next(tensor for tensor in tensors if tensor.name == "tokens.weight")
naive = [next(piece for piece in table.saved if piece.rank == rank) for rank in range(3)]         # "rank r reads file r"
right = sum(min(got.stop, want.stop) - max(got.start, want.start) for got, want in zip(naive, table.loaded, strict=True))

# %% tags=["nbval-check-output"]
for got, want in zip(naive, table.loaded, strict=True):
    print(f"rank {want.rank} wants rows {want.start} to {want.stop - 1}, file {got.rank} has {got.start} to {got.stop - 1}")
print(f"a loader that gives rank r the file r finds {right} of {table.rows} rows where they belong")

# %% [markdown]
# **Exercise:** [reshard_on_load](../exercises/release/reshard_on_load.ipynb): write the loader.

# %%
check("reshard_on_load")

# %% [markdown]
# ## Out of the sharded world
#
# Other tools want whole tensors under the usual names. `export_huggingface` verifies a checkpoint and writes what `from_pretrained` and
# the safetensors library read; no ranks are needed.

# %%
import torch
from safetensors.torch import load_file

exported = checkpoint.export_huggingface(checkpoint.latest(runs / "b"), runs / "exported", dtype=torch.bfloat16)
tensors = load_file(exported / "model.safetensors")

# %% tags=["nbval-check-output"]
print(sorted(path.name for path in exported.iterdir()))
print(len(tensors), "tensors, whole:", tuple(tensors["tokens.weight"].shape), tensors["tokens.weight"].dtype)
shutil.rmtree(runs)

# %% [markdown]
# ## What changed
#
# A run of its own in one go, and one that is put together from a checkpoint:

# %%
changed(whole, resumed)

# %%
ask("11")

# %% [markdown]
# ## What to take along
#
# - A checkpoint holds weights, moments, schedule, place in the text, and each rank's own random state. Leave one out and it is another
#   run.
# - Saving and loading are collectives.
# - A checkpoint exists when it has its final name. A kill costs the save it hits, nothing else.
# - Same ranks: the same bits. Other ranks: the same rows, found by what each file holds; sums in another order.
# - SIGTERM to any rank: step finished, saved by all; the training command then ends with exit code 75, "try again later".
#
# **In the source:** [`checkpoint/commit.py`](../fsdp_ref/checkpoint/commit.py), [`checkpoint/load.py`](../fsdp_ref/checkpoint/load.py),
# [`preemption.py`](../fsdp_ref/preemption.py); [checkpoint_faults.md](../docs/checkpoint_faults.md) lists the faults that tests put in.
#
# **Papers:** Mohan et al., *CheckFreq: Frequent, Fine-Grained DNN Checkpointing*, sections 3.1 (a checkpoint without the data's place is
# wrong) and 4.3 (saving beside training); Wan et al., *ByteCheckpoint: A Unified Checkpointing System for Large Foundation Model
# Development* (resharding on load); Young, *A First Order Approximation to the Optimum Checkpoint Interval* (how often).
