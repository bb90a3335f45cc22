"""What a script written for torch.distributed.fsdp relies on: names, arguments, error types, and how many collectives run."""

from __future__ import annotations

import inspect
from collections import Counter

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fsdp_ref import FSDPModule, fully_shard, ledger, register_fsdp_forward_method, share_comm_ctx
from fsdp_ref.ledger import Category

from .toys import batch, loss_of, toy, train

# Names of torch's FSDPModule that are about other wires than NCCL and gloo: left out on purpose.
LEFT_OUT = {"set_custom_all_gather", "set_custom_reduce_scatter", "set_allocate_memory_from_process_group_for_comm",
            "set_symm_mem_for_comm", "set_separate_reduce_scatter_group"}


def _arguments(function):
    return [(p.name, p.kind) for p in inspect.signature(function).parameters.values()]


def test_names_and_arguments_are_torchs():
    public = {name for name in vars(theirs.FSDPModule) if not name.startswith("_")} - LEFT_OUT
    for name in sorted(public):
        assert _arguments(getattr(FSDPModule, name)) == _arguments(getattr(theirs.FSDPModule, name)), name
    assert {name for name, _ in _arguments(theirs.fully_shard)} <= {name for name, _ in _arguments(fully_shard)}
    assert _arguments(register_fsdp_forward_method) == _arguments(theirs.register_fsdp_forward_method)
    assert _arguments(share_comm_ctx) == _arguments(theirs.share_comm_ctx)


class Counting(TorchDispatchMode):
    """Counts torch's collectives by name."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.calls[func._opname] += 1
        return func(*args, **(kwargs or {}))


class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def _recomputed(rank, world, reentrant):
    """Units inside the checkpointed part: the block's two linear layers."""
    counts, grads = [], []
    for apply in (fully_shard, theirs.fully_shard):
        model = toy()
        for i, block in enumerate(model.blocks):
            for inner in (block.up, block.down):
                apply(inner, reshard_after_forward=True)
            model.blocks[i] = Checkpointed(apply(block, reshard_after_forward=True), reentrant)
        apply(model, reshard_after_forward=True)
        with Counting() as count:
            for step in range(2):
                loss_of(model, batch(step, rank)).backward()
        counts.append({name: n for name, n in count.calls.items() if "gather" in name or "reduce_scatter" in name})
        grads.append([p.grad.full_tensor() for p in model.parameters()])
    for ours, other in zip(*grads, strict=True):
        torch.testing.assert_close(ours, other)
    return counts


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_units_are_gathered_as_often_as_torchs(ranks, reentrant):
    ours, other = ranks(2, _recomputed, reentrant)[0]
    assert ours == other and sum(ours.values()) > 20


def _transforms(rank, world):
    """grad and jvp of a sharded model, beside those of a plain one."""
    def build(apply):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        return apply(model)
    x, tangent = torch.randn(2, 4, generator=torch.Generator().manual_seed(1)), torch.ones(2, 4)
    ours, plain = build(lambda m: [fully_shard(layer) for layer in (m[0], m[2])] and fully_shard(m)), build(lambda m: m)
    for model in (ours, plain):
        model.results = [*torch.func.jvp(model, (x,), (tangent,)), torch.func.grad(lambda t, model=model: model(t).sum())(x)]
    for a, b in zip(ours.results, plain.results, strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), plain(x))
    ours(x).sum().backward()
    plain(x).sum().backward()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)
    return True


def test_torch_func_transforms_of_a_sharded_model(ranks):
    assert all(ranks(2, _transforms))


def _errors(rank, world):
    with pytest.raises(TypeError, match="a module or a list of modules"):
        fully_shard(3)
    with pytest.raises(ValueError, match="empty list"):
        fully_shard([])
    with pytest.raises(ValueError, match="Invalid shard_placement_fn result: 0"):
        fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda _: 0)
    with pytest.raises(ValueError, match="tensor-parallel"):
        fully_shard(nn.Linear(2, 2), dp_mesh_dims="dp")
    model, plain = fully_shard(nn.Linear(2, 2)), nn.Linear(2, 2)
    for call in (model.set_modules_to_forward_prefetch, model.set_modules_to_backward_prefetch, lambda m: share_comm_ctx([model, *m])):
        with pytest.raises(ValueError, match="Expects FSDPModule but got .*Linear"):
            call([plain])
    share_comm_ctx([])
    assert fully_shard.state(model) is not None and fully_shard.state(plain) is None
    return True


def test_errors_have_torchs_types(ranks):
    assert all(ranks(2, _errors))


def _reduced(rank, world, shape):
    """The hook sees what was reduced, may change it, and does so before the user's own division."""
    seen, names = [], ("replicate", "shard")[-len(shape):]
    model = toy()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    fully_shard(model, mesh=mesh)
    model.set_gradient_divide_factor(2.0)
    model.set_all_reduce_hook(lambda out: (seen.append(out.shape), out.mul_(10)))
    if len(shape) == 2:
        with pytest.raises(ValueError, match="native HSDP"):
            model.set_all_reduce_hook(print, stream=object())
    event = torch.Event("cuda") if torch.cuda.is_available() else object()
    model.set_post_optim_event(event)
    loss_of(model, batch(0, rank)).backward()
    assert len(seen) == 1 and seen[0].numel() * shape[-1] >= sum(p.numel() for p in toy().parameters())
    reference = toy()
    sum(loss_of(reference, batch(0, r)) for r in range(world)).backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad * 5)
    assert fully_shard.state(model).post_optim_event is None          # used up
    return True


@pytest.mark.parametrize("shape", [(2,), (2, 1), (1, 2)])
def test_a_hook_on_what_was_reduced(ranks, shape):
    assert all(ranks(2, _reduced, shape))


def _books(rank, world):
    model = fully_shard(toy())
    with ledger.record() as book:
        loss_of(model, batch(0, rank)).backward()
    shards = [a for a in book.allocations if a.category == Category.SHARDED_GRAD]
    buffers = [a for a in book.allocations if a.category == Category.REDUCE_SCATTER]
    held = sum(-(-p.shape[0] // world) * p.numel() // p.shape[0] for p in toy().parameters()) * 4
    return [(a.bytes, a.start, a.end) for a in shards], [(a.start, a.end) for a in buffers], held


def test_the_result_of_a_reduction_is_in_the_books_while_it_arrives(ranks):
    shards, ((start, end),), held = ranks(2, _books)[0]
    assert [nbytes for nbytes, *_ in shards] == [held, held]           # on its way, then as the shards' gradient: never both
    assert start <= shards[0][1] <= shards[0][2] <= shards[1][1] and shards[1][2] is None and shards[0][1] < end


def _shared(rank, world):
    one, two, alone = (fully_shard(toy(seed)) for seed in (0, 1, 1))
    share_comm_ctx([one, two])
    assert fully_shard.state(one).streams is fully_shard.state(two).streams is not fully_shard.state(alone).streams
    train(one, rank)
    return train(two, rank) == train(alone, rank)


def test_roots_that_share_streams_train_as_before(ranks):
    assert all(ranks(2, _shared))
