# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 05 · ZeRO-1 and ZeRO-2
#
# **Four ranks keep four copies of Adam's moments and apply the same update four times. What if each kept a quarter?**
#
# Afterwards you can write ZeRO-1's step with two collectives, say what each row of the ladder holds and sends, to the byte, and say when
# ZeRO-2 sends more than ZeRO-1.
#
# You need: collectives ([01](01_collectives.ipynb)), the 16 bytes a parameter ([03](03_the_memory_ledger.ipynb)) and data parallelism
# ([04](04_data_parallel_from_scratch.ipynb)). Time: 25 minutes to read, under a minute to run.

# %%
from fsdp_ref.lab import ask, changed, check, predict, read, start

lab = start(ranks=4, timeout=20, limit=60)         # seconds for a collective, and for a cell: enough for a busy machine

# %% [markdown]
# ## A model whose weights are one vector
#
# To see the idea without bookkeeping, all weights of a small GPT lie behind one another in one vector of P numbers. The parameters of the
# model are views of it: who writes into the vector changes the model. Every rank builds the same one.

# %%
# %%px
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def fresh():
    """The same model on every rank, its weights views of one vector: (P,)."""
    torch.manual_seed(0)
    model = models.GPT(models.GPTConfig(dim=32, layers=2, context=16))
    flat = parameters_to_vector(model.parameters()).detach()
    vector_to_parameters(flat, model.parameters())
    return model, flat


# %% [markdown]
# Each rank trains on its own four rows of random bytes. The gradient, too, comes as one vector.

# %%
# %%px
tokens = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(rank))

def loss_and_gradient(model):
    """On this rank's batch: the loss, and the gradient as one vector (P,)."""
    model.zero_grad()
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return loss.item(), parameters_to_vector(p.grad for p in model.parameters())


# %% [markdown]
# ## Two ways to take a step
#
# DDP, as in notebook 04: average the whole gradient, update all weights. Here `own` is the whole vector.

# %%
# %%px
world, label = dist.group.WORLD, collectives.Label("model", "by hand")

def ddp_step(model, flat, own, optimizer):
    """Everyone gets the whole mean gradient and updates every weight."""
    loss, grad = loss_and_gradient(model)
    collectives.all_reduce(grad, world, label).wait()                  # (P,), now the mean
    own.grad = grad
    optimizer.step()
    return loss


# %% [markdown]
# **ZeRO-1** begins with a slice. Rank r owns the r-th piece of the vector, and its optimizer sees that piece alone, so Adam makes moments
# for P/N weights. An update of P/N weights needs P/N gradients: instead of the all-reduce, a **reduce-scatter** gives each rank the mean
# of its slice. Afterwards each rank knows its own new weights, and an **all-gather** tells everybody all of them.

# %%
# %%px
def own_slice(flat):
    """This rank's piece, a view: (P,) -> (P / N,)."""
    return flat.chunk(world_size)[rank]


# %%
# %%px
def zero1_step(model, flat, own, optimizer):
    """Everyone updates its slice, then everyone gets the slices of all."""
    loss, grad = loss_and_gradient(model)
    mean = torch.empty_like(own)
    collectives.reduce_scatter(mean, grad, world, label).wait()        # (P,) -> (P / N,)
    own.grad = mean
    optimizer.step()
    collectives.all_gather(flat, own.data.clone(), world, label).wait()     # (P / N,) -> (P,); a clone: `own` lies inside `flat`
    return loss


# %% [markdown]
# What changed since notebook 04's step, and since the one above:

# %%
changed("04:step_parallel", "05:ddp_step")

# %%
changed("05:ddp_step", "05:zero1_step")

# %%
moments = predict("05.moments", "Of 100 moments that rank 0 keeps under DDP, how many does it keep under ZeRO-1?")
losses_guess = predict("05.losses", "Five steps: how far apart will the losses of the two be?",
                       choices=["bit-equal", "apart by rounding", "clearly apart"])

# %%
# %%px
def train_by_hand(step, choose, steps=5):
    """The losses, the moments this rank holds, and the bytes it sent in the last step."""
    model, flat = fresh()
    own = torch.nn.Parameter(choose(flat))                     # shares the vector's memory
    adam = torch.optim.AdamW([own], lr=3e-3)
    losses = [step(model, flat, own, adam) for _ in range(steps - 1)]
    with record() as book:
        losses.append(step(model, flat, own, adam))
    held = adam.state[own]["exp_avg"].numel() + adam.state[own]["exp_avg_sq"].numel()
    return losses, held, sum(event.wire_bytes for event in book.events)


# %%
# %%px
ddp = train_by_hand(ddp_step, lambda flat: flat)
zero1 = train_by_hand(zero1_step, own_slice)

# %% tags=["nbval-check-output"]
ddp, zero1 = lab.run(lambda: (ddp, zero1), ranks=[0])[0]
print("DDP    ", [f"{loss:.3f}" for loss in ddp[0]])
print("ZeRO-1 ", [f"{loss:.3f}" for loss in zero1[0]])
losses_guess.reveal("bit-equal" if ddp[0] == zero1[0] else "apart by rounding")
moments.reveal(100 * zero1[1] / ddp[1])

# %% [markdown]
# Bit-equal, because Adam treats every weight by itself: in a slice or in the whole, each weight gets the same arithmetic, and its
# gradient is summed in the same order. Under DDP every moment was only kept, and updated, on four ranks.
#
# ## What it sends
#
# In a ring of N ranks a message of B bytes costs a rank B·(N−1)/N for an all-gather or a reduce-scatter, and twice that for an
# all-reduce, which is both ([01](01_collectives.ipynb)). So, with fp32 and four ranks:
#
# - DDP: all-reduce of the gradients, 2 · 4P · ¾.
# - ZeRO-1: reduce-scatter of the gradients, 4P · ¾; all-gather of the weights, 4P · ¾.

# %% tags=["nbval-check-output"]
P = 2 * (12 * 32**2 + 13 * 32) + (256 + 16) * 32 + 2 * 32
print(f"P = {P:,}; the formula says {2 * 4 * P * 3 / 4:,.0f} bytes")
print(f"DDP sent {ddp[2]:,.0f}, ZeRO-1 {zero1[2]:,.0f}")
assert ddp[2] == zero1[2] == 2 * 4 * P * 3 / 4, "ZeRO-1 sends what DDP sends"

# %% [markdown]
# To the byte. ZeRO-1 does not add communication. It does its optimizer step *in the middle* of the all-reduce that DDP makes anyway.

# %% [markdown]
# ## The ladder in the engine
#
# ZeRO-2 goes one step further. If a rank updates its slice alone, it needs no other gradients: a layer's gradients can be
# reduce-scattered *during* backward and freed. ZeRO-3 cuts the weights too; it is the subject of the next notebooks.
#
# In the engine a stage is a value, not a class: where parameter, gradient and moments rest.

# %% tags=["nbval-check-output"]
from fsdp_ref.placements import DDP, ZERO1, ZERO2, ZERO3

for row in (DDP, ZERO1, ZERO2, ZERO3):
    print(f"{row.name:7} parameter {row.parameter.value:10} gradient {row.gradient.value:10} optimizer {row.optimizer.value}")


# %% [markdown]
# The function below trains a slightly larger GPT with any row and records the last step. `micro` is the number of micro-batches in a
# step; `every` says whether each of their backwards communicates or only the last.

# %%
def step(model, optimizer, micro, every):
    """Forward, backward, once a micro-batch; then the optimizer. The last loss."""
    tokens = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(rank))
    for i in range(micro):
        model.set_requires_gradient_sync(every or i == micro - 1)
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        (loss / micro).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# %%
def train(placements, micro=1, every=True, steps=4):
    """Train on this rank; the losses, and everyone's ledger of the last step."""
    torch.manual_seed(0)
    model = data_parallel(models.GPT(models.GPTConfig(dim=64, layers=4, context=32)), placements)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = [step(model, optimizer, micro, every) for _ in range(steps - 1)]
    with record(strategy=placements.name) as mine:
        collectives.barrier()
        with ledger.mark("step"):
            losses.append(step(model, optimizer, micro, every))
    return losses, collectives.gather_ledgers(mine).window("step")


# %% [markdown]
# ## Derive the bytes, then measure them
#
# Weights, gradients and Adam's two moments in fp32: 4 + 4 + 8 bytes a parameter. What is cut is divided by N, here 4:
#
# | row | weights | gradients | moments | bytes a parameter |
# |---|---|---|---|---|
# | DDP | 4 | 4 | 8 | 16 |
# | ZeRO-1 | 4 | 4 | 8/N | ? |
# | ZeRO-2 | 4 | 4/N | 8/N | ? |
# | ZeRO-3 | 4/N | 4/N | 8/N | ? |
#
# (The ZeRO paper counts 2 + 2 + 12 for mixed precision: the optimizer then holds an fp32 copy of the weights too.)

# %%
held_guess = predict("05.zero1_bytes", "How many bytes a parameter does a rank hold under ZeRO-1 on four ranks?", unit="bytes")
wire_guess = predict("05.zero2_wire", "How much does a rank send under ZeRO-2, compared with DDP?",
                     choices=["less", "the same", "more"])

# %%
ledgers, losses = {}, {}
for row in (DDP, ZERO1, ZERO2, ZERO3):
    losses[row.name], ledgers[row.name] = lab.run(train, row)[0]
same = [losses[name] == losses["DDP"] for name in losses]
print("the same bits in every loss as DDP:", same)
assert all(same), "all rows compute the same numbers"


# %%
def held(book, rank=0):
    """Bytes on the books of a rank at the moment its optimizer begins."""
    begins = next(e.start for e in book.events if e.rank == rank and e.lane == "optimizer")
    return sum(a.bytes for a in book.allocations
               if a.rank == rank and a.start <= begins and (a.end is None or a.end > begins))


# %% tags=["nbval-check-output"]
P = 4 * (12 * 64**2 + 13 * 64) + (256 + 32) * 64 + 2 * 64
tensors = len({shard.name for shard in ledgers["DDP"].shards})
counters = 4 * tensors                              # Adam also counts its steps, in 4 bytes a tensor
for row in (DDP, ZERO1, ZERO2, ZERO3):
    print(f"{row.name:7} {(held(ledgers[row.name]) - counters) / P:g} bytes a parameter")
    assert held(ledgers[row.name]) == row.bytes_per_parameter(4) * P + counters, row.name
held_guess.reveal((held(ledgers["ZeRO-1"]) - counters) / P)

# %% [markdown]
# Exact to the byte. Who holds what, to scale, at that moment:

# %%
from fsdp_ref import viz

viz.held_by_stage(ledgers)

# %% [markdown]
# And over the whole step. Compare ZeRO-1 with ZeRO-2 in backward (B): under ZeRO-1 the whole gradients (G) pile up and stay until the
# optimizer is through; under ZeRO-2 a block's are reduced to shards (g) and freed while the block before it computes.

# %%
viz.memory_over_step(ledgers)

# %% [markdown]
# The buffers of collectives, and ZeRO-3's blocks that are whole for a moment, do not shrink with the number of ranks. Nor do activations,
# which are not drawn here ([03](03_the_memory_ledger.ipynb)). So a peak falls by less than what rests. On the wire:

# %%
viz.wire_by_stage(ledgers)


# %% tags=["nbval-check-output"]
def sent(book):
    """What rank 0 sent in a step, in models: its bytes over 4P, without the ring's factor 3/4."""
    return sum(event.wire_bytes for event in book.events if event.rank == 0) / (4 * P * 3 / 4)

models_sent = {name: sent(book) for name, book in ledgers.items()}
print("models a step:", models_sent)
assert list(models_sent.values()) == [2, 2, 2, 3], "DDP, ZeRO-1 and ZeRO-2 send 2P, ZeRO-3 3P"
more = models_sent["ZeRO-2"] - models_sent["DDP"]
wire_guess.reveal("the same" if more == 0 else "more" if more > 0 else "less")

# %% [markdown]
# You may have heard that ZeRO-1 and ZeRO-2 save memory by sending more. Measured: the same 2 models a step as DDP. ZeRO-3 sends 3.
#
# Equal bytes need not take equal time: messages differ in size, and in what can hide them. How fast this is on GPUs cannot be seen on a
# laptop over gloo, so nothing is said about it here.
#
# ## Then why does ZeRO-1 still exist?
#
# Because of **gradient accumulation**: the gradients of several micro-batches are added before one optimizer step. Each rank may add its
# own, unreduced gradients and communicate once, after the last. But then it must hold them whole.

# %%
micro_guess = predict("05.micro", "4 micro-batches, reduced after each one: how many models does ZeRO-2 send a step?", unit="models")
kept_guess = predict("05.kept", "And reduced after the last one only: how many bytes of gradient a parameter does it hold at most?",
                     unit="bytes")

# %% [markdown]
# **Change `MICRO`** to 2 or 8 and run the cell again. Look at the models sent, which grow in the lines with `each`, and at the gradient
# bytes, which do not.

# %%
MICRO = 4
books = {(row.name, every): lab.run(train, row, MICRO, every, steps=2)[0][1]
         for row in (ZERO1, ZERO2) for every in (True, False)}


# %% tags=["nbval-check-output"]
from dataclasses import replace

gradients = {}
for (name, every), book in books.items():
    rows = [a for a in book.allocations if "gradient" in a.category]
    gradients[name, every] = replace(book, allocations=rows).peak_bytes(0) / P
    print(f"{name}, reduced after {'each' if every else 'the last'}: sends {sent(book):g} models,",
          f"holds up to {gradients[name, every]:.1f} bytes of gradient a parameter")

# %% tags=["nbval-check-output"]
each, last = sent(books["ZeRO-2", True]), sent(books["ZeRO-2", False])
assert (each, last) == (MICRO + 1, 2), "a reduce-scatter a micro-batch, or one, and the all-gather after the step"
assert gradients["ZeRO-2", True] < 3 < 4 < gradients["ZeRO-2", False], "ZeRO-2 saves only where it reduces after each"
if MICRO == 4:                                              # what was asked
    micro_guess.reveal(each)
    kept_guess.reveal(round(gradients["ZeRO-2", False], 1))

# %% [markdown]
# ZeRO-2 buys its memory with a reduce-scatter after each micro-batch: (m + 1)P instead of 2P for m of them. Let it wait for the last one,
# and it holds whole gradients, as ZeRO-1 does. ZeRO-1 should always wait: reduced after each, it holds the sum so far beside the new
# gradients.
#
# ## Where this lives in the source
#
# [`fsdp_ref/placements.py`](../fsdp_ref/placements.py) is the table. [`fsdp_ref/engine/gradients.py`](../fsdp_ref/engine/gradients.py) is
# where ZeRO-1 and ZeRO-2 part: a single question.

# %%
read("engine/gradients.py", "at_the_step")

# %% [markdown]
# The all-gather after the step stands in [`fsdp_ref/optimizers.py`](../fsdp_ref/optimizers.py), at the end of `_after_step`.
#
# ## Check and quiz
#
# [The first exercise](../exercises/release/zero1_step.ipynb) asks for ZeRO-1's step, with momentum in Adam's place; [the
# second](../exercises/release/zero2_backward.ipynb) for ZeRO-2's backward, with hooks as in notebook 04. Both are graded on who held what
# and what was sent, not only on numbers.

# %%
check("zero1_step")

# %%
check("zero2_backward")

# %%
ask("05")

# %% [markdown]
# ## What to take along
#
# - ZeRO-1 takes DDP's all-reduce apart and does the optimizer's step in the middle: the same bits, the same bytes, moments / N.
# - ZeRO-2 also frees gradients during backward. It sends the same, unless gradients are accumulated.
# - At rest: 16, 8 + 8/N, 4 + 12/N, 16/N bytes a parameter (fp32, Adam).
# - So far P divided by N. [06](06_flatten_shard_pad.ipynb) cuts what does not divide.
#
# **Papers:** Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, section 5 (the three stages) and
# section 7 (their traffic); Xu et al., *Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training*.
