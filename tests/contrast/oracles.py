"""What both contrasts are measured against: a single process with everybody's batches, and torch's own fully_shard."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import checkpoint

from fsdp_ref import collectives, ledger
from fsdp_ref.ledger import Category, Ledger
from tests.engine.toys import batch, loss_of, toy

# Sums over up to 4 ranks run in another order, which differs by at most 3 roundings of the largest partial sum; the weights carry the
# difference on through three AdamW steps. Measured: 1 rounding of a number near 1. (Sum for mean, a lost row, a stale weight: over 1e-3.)
CLOSE = {"rtol": 16 * torch.finfo(torch.float32).eps, "atol": 16 * torch.finfo(torch.float32).eps}


def torch_sharded(world: int) -> nn.Module:
    model, mesh = toy(), init_device_mesh("cpu", (world,))
    for block in model.blocks:
        torch_fully_shard(block, mesh=mesh)
    return torch_fully_shard(model, mesh=mesh)


def whole_batch_loss(model: nn.Module, step: int, world: int) -> torch.Tensor:
    """The mean over all ranks' batches, in one process."""
    return torch.stack([loss_of(model, batch(step, rank)) for rank in range(world)]).mean()


def three_steps(model: nn.Module, rank: int, world: int, gradients, parameters) -> bool:
    """Three AdamW steps of `model`, of a single process with the whole batch, and of torch's fully_shard, side by side.

    `gradients(model)` and `parameters(model)` are name -> whole tensor on every rank, for the model under test. With two ranks the bits
    are torch's, since a + b is b + a; else CLOSE.
    """
    alone, theirs = toy(), torch_sharded(world)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, alone, theirs)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [loss_of(model, batch(step, rank)), whole_batch_loss(alone, step, world), loss_of(theirs, batch(step, rank))]
        for loss in losses:
            loss.backward()
        mean = losses[0].detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        torch.testing.assert_close(mean, losses[1].detach(), **CLOSE)
        torch.testing.assert_close(losses[0], losses[2], **CLOSE)
        _compare(gradients(model), *({n: p.grad for n, p in each.named_parameters()} for each in (alone, theirs)), world)
        for optimizer in optimizers:
            optimizer.step()
        _compare(parameters(model), dict(alone.named_parameters()), dict(theirs.named_parameters()), world)
    return True


def _compare(ours: dict, alone: dict, theirs: dict, world: int) -> None:
    assert set(ours) == set(alone) == set(theirs)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, alone[name].detach(), msg=lambda m, name=name: f"{name}: {m}", **CLOSE)
        torchs = theirs[name].full_tensor().detach()
        if world == 2:
            assert torch.equal(tensor, torchs), f"{name}: not the bits of torch's fully_shard"
        torch.testing.assert_close(tensor, torchs, msg=lambda m, name=name: f"{name}: {m}", **CLOSE)


def peak(book: Ledger, *categories: Category) -> int:
    """The most bytes of `categories` (default: all) that were alive at one moment on this rank."""
    rows = [row for row in book.allocations if not categories or row.category in categories]
    return Ledger(allocations=rows).peak_bytes(ledger.rank())


def settle() -> None:
    """Send a word round, so that the thread that carries messages lets go of the buffers of the last one."""
    collectives.barrier()


def nbytes(params) -> int:
    return sum(param.numel() * param.element_size() for param in params)


class Again(nn.Module):
    """Activation checkpointing: `inner` runs once more in backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Tied(nn.Module):
    """An embedding whose matrix is the head's too, and a buffer."""

    def __init__(self, rows: int = 9) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(rows, 4), nn.Linear(4, rows, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens)) * self.scale


class Two(nn.Module):
    """6 + 4 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.arange(6.0).view(2, 3)), nn.Parameter(torch.arange(6.0, 10.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.a @ x).sum() + (self.b * 3).sum()) ** 2
