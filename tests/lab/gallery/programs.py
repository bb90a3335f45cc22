"""The gallery: one mistake a program, for two ranks, as learners and public bug reports make it.

Every program finds rank, world_size, torch, dist and fsdp_ref. A line that ends in `# here` must be told by its number.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_ref.catalogue import Kind


@dataclass(frozen=True)
class Program:
    """`kept`: the pool survives it. `words`: what the report must say besides the line."""

    name: str
    kind: Kind
    text: str
    words: tuple[str, ...] = ()
    ranks: tuple[int, ...] | None = (1,)
    kept: bool = False

    @property
    def line(self) -> int | None:
        """The number of the line that ends in `# here`."""
        return next((number for number, line in enumerate(self.text.splitlines(), 1) if line.endswith("# here")), None)


SETUP = "from torch import nn\nfrom fsdp_ref import collectives, checkpoint, fully_shard\n"

TOLD_BEFORE_ANYTHING_IS_SENT = [
    Program("swapped_order", Kind.ORDER, """\
grad_a, grad_b = torch.ones(4), torch.ones(4)
for t in (grad_b, grad_a) if rank == 1 else (grad_a, grad_b):
    dist.all_reduce(t)  # here
""", ("all-reduce of grad_a", "all-reduce of grad_b", "4 x float32"), kept=True),
    Program("order_of_a_set", Kind.ORDER, """\
layers = {"up": torch.ones(2), "down": torch.ones(2)}
for name in sorted(layers, reverse=rank == 1):
    up, down = layers["up"], layers["down"]
    dist.all_reduce(layers[name])  # here
""", ("takes its calls in another order",), kept=True, ranks=(1,)),
    Program("other_branch", Kind.BRANCH, """\
a, b = torch.ones(4), torch.ones(4)
if rank == 1:
    dist.all_reduce(b)  # here
else:
    dist.all_reduce(a)
""", ("`if rank == 1` (line 2)",), kept=True),
    Program("extra_call", Kind.EXTRA, """\
a, b = torch.ones(4), torch.ones(4)
dist.all_reduce(a)
if rank == 1:
    dist.all_reduce(a)  # here
dist.all_reduce(b)
""", ("rank 1 made its last call a second time", "`if rank == 1` (line 3)"), kept=True),
    Program("sizes_of_all_reduce", Kind.SIZE, "x = torch.ones(2 + rank)\ndist.all_reduce(x)  # here\n", ("2 and 3",), kept=True),
    Program("sizes_of_all_gather", Kind.SIZE, """\
x = torch.ones(2 + rank)
out = [torch.empty(3) for _ in range(world_size)]
dist.all_gather(out, x)  # here
""", ("2 and 3", "all-gather of x"), kept=True),
    Program("other_dtype", Kind.DTYPE, """\
x = torch.ones(2, dtype=torch.bfloat16 if rank == 1 else torch.float32)
dist.all_reduce(x)  # here
""", ("float32 and bfloat16",), kept=True),
    Program("sum_or_max", Kind.REDUCTION, """\
x = torch.ones(2)
dist.all_reduce(x, op=dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)  # here
""", ("sum and max",), kept=True),
    Program("everyone_is_the_root", Kind.ROOT, "x = torch.ones(2)\ndist.broadcast(x, src=rank)  # here\n", ("src 0 and src 1",), kept=True),
    Program("other_operation", Kind.OPERATION, """\
x, out = torch.ones(2), torch.empty(4)
dist.all_gather_into_tensor(out, x) if rank == 1 else dist.all_reduce(x)  # here
""", ("all-reduce and all-gather-into-tensor",), kept=True),
    Program("uneven_last_batch", Kind.BRANCH, """\
grad, total = torch.ones(2), torch.ones(1)
for batch in range(3 - rank):
    dist.all_reduce(grad)  # here
dist.all_reduce(total)
""", ("stands in the loop `for batch in range(3 - rank)` (line 2)", "all-reduce of grad", "all-reduce of total"), kept=True),
    Program("best_loss_differs", Kind.BRANCH, """\
loss, best = torch.tensor(1.0 + rank), 1.5
if loss < best:
    dist.barrier()  # here
dist.all_reduce(loss)
""", ("line 3 stands under `if loss < best` (line 2), which was false on rank 1",), kept=True),
    Program("b42_save_on_rank_0", Kind.SAVING, SETUP + """\
x, model = torch.ones(2), fully_shard(nn.Linear(4, 4))
checkpoint.save(folder, step=1, model=model)
if rank == 0:
    checkpoint.save(folder, step=2, model=model)  # here
dist.all_reduce(x)
""", ("rank 0 alone saves or loads a checkpoint", "`if rank == 0` (line 5)"), (0,), kept=True),
    Program("collective_in_a_handler", Kind.HANDLER, """\
import signal
def save(number, frame):
    dist.barrier()  # here
signal.signal(signal.SIGUSR2, save)
if rank == 1:
    signal.raise_signal(signal.SIGUSR2)
x = torch.ones(2)
dist.all_reduce(x)
""", ("rank 1: a collective in the handler of SIGUSR2",), kept=True),
    Program("other_unit_order", Kind.MODEL, SETUP + """\
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
for layer in model if rank == 0 else [model[1]]:
    fully_shard(layer)
fully_shard(model)
model(torch.ones(1, 4))
""", ("the ranks shard different models: rank 1 has",), kept=True),
    Program("other_seed", Kind.SEED, SETUP + """\
torch.manual_seed(rank)
model = fully_shard(nn.Linear(4, 4))
model(torch.ones(1, 4))
""", ("rank 1 starts from other weights of weight than rank 0", "torch.manual_seed"), kept=True),
    Program("other_unit_of_ours", Kind.ORDER, SETUP + """\
a, b = torch.ones(2), torch.ones(2)
for name in "ba" if rank == 1 else "ab":
    collectives.all_reduce(a, dist.group.WORLD, collectives.Label(name, "step")).wait()  # here
""", ("all-reduce of a in step (avg)", "rank 1: all-reduce of b in step (avg)"), kept=True),
    Program("raises_everywhere", Kind.EXCEPTION, "x = 1\nundefined_name  # here\n", ("ranks 0 and 1 raised NameError",), (0, 1), kept=True),
    Program("raises_on_one", Kind.EXCEPTION, "if rank == 1:\n    raise ValueError('no such file')  # here\n",
            ("rank 1 raised ValueError: no such file",), kept=True),
]

ONE_IS_LOST = [
    Program("b41_raises_before_a_gather", Kind.EXCEPTION, """\
x = torch.ones(2)
if rank == 1:
    raise ValueError("no such file")  # here
dist.all_reduce(x)
""", ("rank 1 raised ValueError: no such file",)),
    Program("only_rank_0_comes", Kind.BRANCH, """\
if rank == 0:
    dist.barrier()  # here
""", ("`if rank == 0` (line 1), which was false on rank 1",)),
    Program("early_return", Kind.EXIT, """\
def step(loss):
    if loss.isnan():
        return
    dist.all_reduce(loss)  # here
step(torch.tensor(float("nan") if rank == 1 else 1.0))
""", ("`if loss.isnan()` (line 2) can leave the function",)),
    Program("sys_exit", Kind.EXIT, """\
import sys
if rank == 1:
    sys.exit(0)
dist.barrier()
"""),
    Program("os_exit", Kind.EXIT, "import os\nif rank == 1:\n    os._exit(7)\ndist.barrier()\n", ("exited with status 7",)),
    Program("killed", Kind.SIGNAL, "import os\nif rank == 1:\n    os.kill(os.getpid(), 9)\ndist.barrier()\n", ("SIGKILL",)),
    Program("segmentation_fault", Kind.SIGNAL, "import os\nif rank == 1:\n    os.kill(os.getpid(), 11)\ndist.barrier()\n", ("SIGSEGV",)),
    Program("too_large", Kind.MEMORY, """\
if rank == 1:
    torch.empty(2**50)  # here
dist.barrier()
""", ("rank 1 raised RuntimeError",)),
    Program("endless_loop", Kind.LOOP, """\
done = False
while rank == 1 and not done:
    done = False
dist.barrier()
""", ("rank 1", "`while rank == 1 and (not done)` (line 2)")),
    Program("both_receive_first", Kind.DEADLOCK, """\
x = torch.ones(2)
dist.recv(x, src=1 - rank)  # here
dist.send(x, dst=1 - rank)
""", ("recv from rank",), (0, 1)),
    Program("b42_load_on_rank_0", Kind.SAVING, SETUP + """\
model = fully_shard(nn.Linear(4, 4))
checkpoint.save(folder, step=1, model=model)
if rank == 0:
    checkpoint.load(folder, model=model)  # here
""", ("rank 1", "`if rank == 0` (line 5)")),
    Program("abort_in_gloo", Kind.ABORT, """\
from fsdp_ref import collectives
collectives.check_calls(False)
x = torch.ones(1000 * (1 + rank))
dist.all_reduce(x)
""", ("SIGABRT",), None),
]
PROGRAMS = TOLD_BEFORE_ANYTHING_IS_SENT + ONE_IS_LOST
