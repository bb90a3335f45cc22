# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 08 · FSDP, backward
#
# **Backward needs the weights that forward has freed. Where do they come from, and where do the gradients go?**
#
# Afterwards you can write FSDP's backward with three hooks, read the order of a step from the ledger, and say what
# `reshard_after_forward` costs and saves.
#
# You need: the two hooks of [07](07_fsdp_forward.ipynb) and the reduce-scatter of [05](05_zero1_and_zero2.ipynb). Time: 30 minutes to
# read, under a minute to run.

# %%
from fsdp_ref.lab import ask, changed, check, predict, read, start

lab = start(ranks=4, timeout=20, limit=60)         # seconds for a collective, and for a cell: enough for a busy machine

# %% [markdown]
# ## The second gather
#
# A unit keeps `own`, this rank's slice of its weights, and `whole`, a vector of which all its weights are views and whose memory comes and
# goes. Gather and free, as in notebook 07, with a label that says for which phase:

# %%
# %%px
def unshard(unit, phase):
    """Give the whole its memory, and fill it with the slices of all ranks."""
    nbytes = unit.own.nbytes * world_size
    unit.whole.untyped_storage().resize_(nbytes)
    unit.token = ledger.allocate(ledger.Category.UNSHARDED_PARAM, unit.name, nbytes)
    collectives.all_gather(unit.whole, unit.own, dist.group.WORLD, collectives.Label(unit.name, phase)).wait()

def reshard(unit):
    """Take the memory of the whole away."""
    unit.whole.untyped_storage().resize_(0)
    ledger.free(unit.token)


# %% [markdown]
# After forward the unit is freed, and its output gets a hook: autograd calls it when the output's gradient is there, which is when the
# unit's backward is about to begin. It gathers again.

# %%
# %%px
def post_forward(unit, args, output):
    """Free now; gather again when backward comes to this unit."""
    reshard(unit)
    output.register_hook(lambda grad: unshard(unit, "backward"))


# %% [markdown]
# Backward leaves a gradient on every weight. When the last one of the unit is there, the weights are not needed any more, and the
# gradients, which only speak for this rank's batch, are **reduce-scattered**: each rank keeps the mean over all ranks, for its slice.

# %%
# %%px
def post_backward(unit):
    """When all gradients of the unit are there: free the weights, reduce-scatter the gradients."""
    params = list(unit.parameters())
    if any(param.grad is None for param in params):
        return
    reshard(unit)
    grad = torch.nn.utils.parameters_to_vector(param.grad for param in params)         # (P,)
    for param in params:
        param.grad = None
    unit.grad = torch.empty_like(unit.own)                                             # (P / N,)
    collectives.reduce_scatter(unit.grad, grad, dist.group.WORLD, collectives.Label(unit.name, "backward")).wait()


# %%
# %%px
def shard_unit(unit, name):
    """Keep a slice of the unit's weights; gather before forward and backward, free after each."""
    unit.whole = torch.nn.utils.parameters_to_vector(unit.parameters()).detach()       # (P,)
    torch.nn.utils.vector_to_parameters(unit.whole, unit.parameters())
    unit.own, unit.name, unit.token = unit.whole.chunk(world_size)[rank].clone(), name, 0      # (P / N,)
    reshard(unit)
    unit.register_forward_pre_hook(lambda unit, args: unshard(unit, "forward"))
    unit.register_forward_hook(post_forward)
    for param in unit.parameters():
        param.register_post_accumulate_grad_hook(lambda _: post_backward(unit))


# %%
changed("07:shard_unit", "08:shard_unit")

# %%
gathers = predict("08.gathers", "Three blocks, forward and backward: how many all-gathers does a rank take part in?", unit="all-gathers")
order_guess = predict("08.order", "In which order does backward gather the blocks?", choices=["0, 1, 2", "2, 1, 0"])

# %%
# %%px
def blocks():
    """Three transformer blocks, the same on every rank."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(models.Block(models.GPTConfig(dim=64)) for _ in range(3)))

mine, plain = blocks(), blocks()
for i, block in enumerate(mine):
    shard_unit(block, f"block {i}")
x = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(rank))

# %%
# %%px
with record() as book:
    collectives.barrier()
    with ledger.mark("step"):
        mine(x).square().mean().backward()

# %% tags=["nbval-check-output"]
book = lab.run(lambda: collectives.gather_ledgers(book))[0].window("step")
log = [(event.lane, event.phase, event.unit) for event in book.events if event.rank == 0 and event.bytes]
for lane, phase, unit in log:
    print(f"{phase:8} {lane:14} {unit}")

# %% tags=["nbval-check-output"]
gathers.reveal(sum(lane == "all-gather" for lane, _, _ in log))
backward = [unit[-1] for lane, phase, unit in log if (lane, phase) == ("all-gather", "backward")]
order_guess.reveal(", ".join(backward))

# %% [markdown]
# A few hooks, and the order follows from autograd: backward meets the blocks last first. Are the gradients right? Against the unsharded
# model with an all-reduce of the whole gradient, as in notebook 04:

# %% tags=["nbval-check-output"]
# %%px
plain(x).square().mean().backward()
equal = []
for block, unit in zip(plain, mine, strict=True):
    grad = torch.nn.utils.parameters_to_vector(param.grad for param in block.parameters())
    collectives.all_reduce(grad, dist.group.WORLD, collectives.Label(unit.name, "check")).wait()
    equal.append(torch.equal(grad.chunk(world_size)[rank], unit.grad))
print("my slice of the mean gradient has the same bits:", equal)

# %% [markdown]
# ## What autograd kept meanwhile
#
# You may have heard that freeing the weights after forward must lose what backward needs: either the weights, or the activations. Look at
# what autograd saves. PyTorch shows every saved tensor to a pair of hooks, one when it is saved and one when backward takes it out.

# %%
kept = predict("08.kept", "Between forward and backward: how many bytes do the weights have that autograd saved?", unit="bytes")

# %%
# %%px
saved, taken_out = [], []
def take_out(tensor):
    """Backward wants this tensor."""
    taken_out.append(tensor.untyped_storage().size())
    return tensor

with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, take_out):
    loss = mine(x).square().mean()
wholes = {unit.whole.untyped_storage()._cdata for unit in mine}
weights = [tensor for tensor in saved if tensor.untyped_storage()._cdata in wholes]

# %%
# %%px
def in_memory(tensors):
    """Bytes behind these tensors now; memory that several share counts once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().size() for t in tensors}.values())

activations = [tensor for tensor in saved if tensor.untyped_storage()._cdata not in wholes]
between = len(weights), in_memory(weights), len(activations), in_memory(activations)
loss.backward()
smallest = min(taken_out)

# %% tags=["nbval-check-output"]
between, smallest = lab.run(lambda: (between, smallest))[0]
print("views of weights saved for backward:", between[0] > 0, "| bytes behind them, between forward and backward:", between[1])
print("when backward took tensors out, all had memory:", smallest > 0)
kept.reveal(between[1])
assert between[1] == 0 < smallest and between[3] > 0, "weights have no memory meanwhile, activations have"

# %% [markdown]
# Autograd saved views of the weights, and they have no memory while nobody needs it. The second gather fills the *same* storage, so the
# views are right again at the moment backward takes them out. Activations were never freed: FSDP does not touch them.
#
# That is why memory comes and goes while tensors stay. Freeing by putting an empty tensor in the weight's place looks the same and frees
# nothing of the matrices:

# %% tags=["nbval-check-output"]
# %%px
naive, saved = blocks()[0], []
with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
    output = naive(x)
matrices = [t.untyped_storage()._cdata for t in naive.parameters() if t.ndim == 2]
for param in naive.parameters():
    param.data = torch.empty(0)                             # "freed"
held = in_memory(t for t in saved if t.untyped_storage()._cdata in matrices)
print(f"autograd still holds {held:,} of the {4 * 12 * 64**2:,} bytes of the matrices")

# %% [markdown]
# Each `Linear` saves a transposed view of its weight, and a view keeps the memory it looks at.
#
# ## Mean or sum
#
# `collectives.reduce_scatter` averages. A sum would be N times as large. Whether that is noticed depends on the optimizer:

# %%
scale = predict("08.scale", "Sum instead of mean on 4 ranks: how many times longer is AdamW's first step?", unit="times")

# %%
# %%px
def step_length(optimizer, grad, **options):
    """How far the first step moves a weight vector with this gradient."""
    weight = torch.nn.Parameter(torch.zeros_like(grad))
    weight.grad = grad
    optimizer([weight], lr=0.1, **options).step()
    return weight.detach().norm().item()

mean = mine[0].grad
total = mean * world_size                                   # what op=SUM would have left
lengths = {kind.__name__: step_length(kind, total) / step_length(kind, mean) for kind in (torch.optim.SGD, torch.optim.AdamW)}

# %% tags=["nbval-check-output"]
lengths = lab.run(lambda: lengths)[0]
print("times longer:", {name: round(ratio, 2) for name, ratio in lengths.items()})
scale.reveal(round(lengths["AdamW"], 2))

# %% [markdown]
# With SGD the learning rate is silently multiplied by N. AdamW divides by the gradient's own size and hides the mistake, until something
# looks at the size: clipping, or its ε.
#
# ## What the hooks by hand miss
#
# `post_backward` waits for *every* gradient of the unit. Give a block a weight that this step does not use (an expert that was not
# chosen, a head for another task):

# %% tags=["nbval-check-output"]
# %%px
def spoiled():
    """Three blocks; the middle one has a weight that no step uses."""
    model = blocks()
    model[1].unused = torch.nn.Parameter(torch.zeros(4))
    return model

mine = spoiled()
for i, block in enumerate(mine):
    shard_unit(block, f"block {i}")
mine(x).square().mean().backward()
print("reduced:", [hasattr(unit, "grad") for unit in mine], "| still whole, bytes:", [unit.whole.untyped_storage().size() for unit in mine])

# %% [markdown]
# Block 1 waited for a gradient that never came: not reduced, never freed, and no error. So the engine does not count. It watches the
# unit's *inputs*: when their gradients exist, so do those of the weights. And where an input needs no gradient, as the token numbers that
# enter the root, a **callback at the end of backward** does what is left.

# %%
# %%px
def with_the_engine():
    """The same model as FSDP units: which blocks were reduced, and how many bytes stayed whole."""
    before, model = ledger.live_bytes(ledger.Category.UNSHARDED_PARAM), spoiled()
    for module in (*model, model):
        fully_shard(module)
    model(x).square().mean().backward()
    used = [[param for name, param in block.named_parameters() if name != "unused"] for block in model]
    return [all(param.grad is not None for param in params) for params in used], \
        ledger.live_bytes(ledger.Category.UNSHARDED_PARAM) - before


# %% tags=["nbval-check-output"]
# %%px
reshard(mine[1])                                            # what nobody did
reduced, whole_bytes = with_the_engine()
print("reduced:", reduced, "| still whole, bytes:", whole_bytes)

# %%
read("engine/schedule.py", "queue_callback")

# %% [markdown]
# ## Keep the weights, or gather twice
#
# `reshard_after_forward=False` leaves every unit whole between forward and backward. The price and the gain, for P parameters of which B
# are in the last block and R in the root:
#
# - **True**: all-gather, all-gather, reduce-scatter: 3P on the wire. In backward the root and one block are whole: 4(R + B) bytes.
# - **False**: all-gather, reduce-scatter: 2P, as DDP. When backward begins, everything is whole: 4P bytes.
# - **None**: only what backward needs at once is kept, the root and the last block: 3P − R − B.

# %%
def step(reshard):
    """Everyone's ledger of the second step of a GPT under ZeRO-3."""
    torch.manual_seed(0)
    model = data_parallel(models.GPT(models.GPTConfig(dim=64, layers=6, context=32)), ZERO3, prefetch=0, reshard_after_forward=reshard)
    tokens = torch.randint(256, (4, 33))
    with record() as mine:
        for name in ("first", "second"):
            model.zero_grad()
            collectives.barrier()
            with ledger.mark(name):
                model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    return collectives.gather_ledgers(mine).window("second")


# %%
wire = predict("08.wire", "`reshard_after_forward=False`: how many models does a rank send a step? (True: 3)", unit="models")
peak = predict("08.peak", "And the peak of memory: by which factor does it grow?", unit="times")

# %% [markdown]
# **Change `OPTIONS`**: add `2`, which keeps half of each weight on every rank, so that backward gathers from one neighbour only. Look at
# both columns.

# %%
OPTIONS = (True, False, None)
books = {option: lab.run(step, option)[0] for option in OPTIONS}


# %% tags=["nbval-check-output"]
from dataclasses import replace

B, R = 12 * 64**2 + 13 * 64, (256 + 32) * 64 + 2 * 64
P = 6 * B + R
sent, whole = {}, {}
for option, book in books.items():
    sent[option] = sum(event.wire_bytes for event in book.events if event.rank == 0) / (4 * P * 3 / 4)
    rows = [a for a in book.allocations if a.category == "unsharded parameter"]
    whole[option] = replace(book, allocations=rows).peak_bytes(0)
    print(f"{option!s:5}: sends {sent[option]:.2f} models, up to {whole[option]:,} bytes of whole weights, peak {book.peak_bytes(0):,}")

# %% tags=["nbval-check-output"]
derived = {True: 3, False: 2, None: (3 * P - R - B) / P}
assert all(abs(sent[option] - derived[option]) < 1e-9 for option in derived if option in sent), "the wire is as derived"
assert all(whole[option] == 4 * (P if option is False else R + B) for option in derived if option in whole), "whole weights too"
wire.reveal(sent[False])
peak.reveal(round(books[False].peak_bytes(0) / books[True].peak_bytes(0), 1))

# %% [markdown]
# You may have heard that `reshard_after_forward` is a knob for speed. It is one for *bytes*: a third of the traffic against the memory of
# the whole model. Whether that is faster depends on whether the second gather is hidden under computation
# ([10](10_overlap_and_prefetch.ipynb)); on a laptop nothing can be said about it. The lives of the weights, with True and with False:

# %%
from fsdp_ref import viz

viz.weight_lifetimes(books[True])

# %%
viz.weight_lifetimes(books[False])

# %% [markdown]
# With False the lives are nested, and everything is alive in the middle. All categories on the same axes:

# %%
viz.memory_over_step({"reshard": books[True], "keep": books[False]})

# %% [markdown]
# And the whole step as a timeline, on two of the ranks. Find the order of the log above: gathers (a) from block 0 to 5, then from 5 to 0,
# each followed by its reduce-scatter (r), which may still be under way while the block before it computes. In backward the engine asks
# for the next block ahead of time. Hatched: the rank only waits.

# %%
viz.step_timeline(books[True], ranks=[0, 1])

# %% [markdown]
# ## Where this lives in the source
#
# [`fsdp_ref/engine/hooks.py`](../fsdp_ref/engine/hooks.py) has the four places of a step in its docstring; `pre_backward` and
# `post_backward` are the two functions by hand. [`fsdp_ref/engine/reduction.py`](../fsdp_ref/engine/reduction.py) is one reduce-scatter.

# %%
read("engine/hooks.py", "post_backward")

# %% [markdown]
# Free first, reduce second, so that the weights and the reduction's buffer are never in memory together.
#
# ## Check and quiz
#
# [The exercise](../exercises/release/fsdp_backward.ipynb): values, lifetime and the exact order are graded.

# %%
check("fsdp_backward")

# %%
ask("08")

# %% [markdown]
# ## What to take along
#
# - A unit is gathered twice a step, in backward last first, and its gradients are reduce-scattered once: 3P.
# - Autograd keeps views without memory; the second gather fills the same storage. Activations stay.
# - The result is the mean, one slice a rank. A sum hides under AdamW.
# - Keeping weights after forward saves P on the wire and costs the whole model in memory.
# - The optimizer now steps on slices: [09](09_optimizer_clip_accumulate_precision.ipynb).
#
# **Papers:** Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models* (arXiv 1910.02054, 2019), section
# 7.2.2; Zhao et al., *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel* (arXiv 2304.11277, 2023), sections 3.2.1, 3.3 and
# 4.3; Zhang et al., *SimpleFSDP* (arXiv 2411.00284): the same with one autograd function a weight.
