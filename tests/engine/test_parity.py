"""Our fully_shard beside torch's, on the same model and data: the same bits in losses, gradients, shards and moments."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_ref import collectives
from fsdp_ref.engine import data_parallel, fully_shard
from fsdp_ref.placements import DDP, ZERO3
from tests.engine.toys import batch, loss_of, toy


def _sharded(apply, world, reshard, **sizes):
    model, mesh = toy(**sizes), init_device_mesh("cpu", (world,))
    for block in model.blocks:
        apply(block, mesh=mesh, reshard_after_forward=reshard)
    apply(model, mesh=mesh, reshard_after_forward=reshard)
    return model


def _same(ours, theirs):
    assert isinstance(ours, DTensor) and ours.placements == theirs.placements and ours.shape == theirs.shape
    assert ours.to_local().shape == theirs.to_local().shape
    return torch.equal(ours.to_local(), theirs.to_local())


def _beside_torch(rank, world, reshard):
    models = [_sharded(apply, world, reshard) for apply in (fully_shard, torch_fully_shard)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    for step in range(3):
        losses = [loss_of(model, batch(step, rank)) for model in models]
        assert torch.equal(*losses), f"loss of step {step}"
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        for (name, ours), (other, theirs) in zip(*(m.named_parameters() for m in models), strict=True):
            assert name == other and _same(ours.grad, theirs.grad), f"gradient of {name} in step {step}"
        for optimizer in optimizers:
            optimizer.step()
        for (name, ours), (_, theirs) in zip(*(m.named_parameters() for m in models), strict=True):
            assert _same(ours, theirs), f"{name} after step {step}"
            states = [optimizer.state[param] for optimizer, param in zip(optimizers, (ours, theirs), strict=True)]
            assert all(_same(states[0][key], states[1][key]) for key in ("exp_avg", "exp_avg_sq")), name
    return True


def _beside_torch_by_library(rank, world, reshard):
    with collectives.route("library"):
        return _beside_torch(rank, world, reshard)


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_bits_equal_torch_fully_shard(ranks, world, reshard):
    """Two ranks: always (a + b is b + a). More: over gloo's own collectives, whose sums run round a ring as torch's do."""
    assert all(ranks(world, _beside_torch if world == 2 else _beside_torch_by_library, reshard))


def _close_to_torch(rank, world):
    """Over the direct route more than two ranks are summed in another order than gloo's: 4 roundings of fp32 a sum, 3 steps."""
    models = [_sharded(apply, world, None) for apply in (fully_shard, torch_fully_shard)]
    for step in range(3):
        for model in models:
            model.zero_grad()
            loss_of(model, batch(step, rank)).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    for ours, theirs in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(ours.to_local(), theirs.to_local(), rtol=0, atol=12 * torch.finfo(torch.float32).eps)
    return True


def test_the_direct_route_differs_from_torch_by_roundings_only(ranks):
    assert all(ranks(4, _close_to_torch))


def _beside_one_process(rank, world, placements):
    """float64, so that only the order of the sum over ranks can differ."""
    reference, model = toy(dtype=torch.float64), toy(seed=rank, dtype=torch.float64)      # data_parallel starts from rank 0's
    data_parallel(model, placements)
    for step in range(2):
        torch.stack([loss_of(reference, batch(step, r)) for r in range(world)]).mean().backward()
        loss_of(model, batch(step, rank)).backward()
        for (name, ours), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
            ours_full = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
            torch.testing.assert_close(ours_full, theirs.grad, rtol=1e-12, atol=1e-14, msg=lambda m, name=name: f"{name}: {m}")
    return True


@pytest.mark.parametrize("placements", [DDP, ZERO3], ids=lambda p: p.name)
@pytest.mark.parametrize("world", [1, 3])
def test_gradients_accumulate_to_those_of_one_process_with_the_whole_batch(ranks, world, placements):
    assert all(ranks(world, _beside_one_process, placements))


def _beside_torch_ddp(rank, world):
    ours, theirs = toy(), DistributedDataParallel(toy())
    data_parallel(ours, DDP)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (ours, theirs)]
    for step in range(3):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, batch(step, rank)).backward()
            optimizer.step()
        for (name, a), b in zip(ours.named_parameters(), theirs.module.parameters(), strict=True):
            # torch divides before it sums, we after; two ranks and a division by 2 leave the same bits
            assert torch.equal(a, b) if world == 2 else torch.allclose(a, b, atol=1e-6), name
    return True


@pytest.mark.parametrize("world", [2, 3])
def test_ddp_beside_torch_ddp(ranks, world):
    assert all(ranks(world, _beside_torch_ddp))


def _state_dicts(rank, world):
    model = _sharded(fully_shard, world, None)
    loss_of(model, batch(0, rank))                                  # the root is whole now
    saved = copy.deepcopy(model.state_dict())
    assert all(isinstance(value, DTensor) for value in saved.values())
    whole = {name: value.full_tensor() for name, value in saved.items()}
    assert all(torch.equal(whole[name], param) for name, param in toy().state_dict().items())
    torch.manual_seed(99)
    other = _sharded(fully_shard, world, None)
    with torch.no_grad():
        for param in other.parameters():
            param.fill_(7.0)
    other.load_state_dict(saved)
    alone = dist.get_rank()
    assert torch.equal(loss_of(other, batch(1, alone)), loss_of(model, batch(1, alone)))
    third = _sharded(fully_shard, world, None)
    third.load_state_dict({name: value * 2 for name, value in saved.items()}, assign=True)
    return torch.equal(third.head.weight.full_tensor(), whole["head.weight"] * 2)


def test_state_dict_is_sharded_and_loads_in_place_or_by_assignment(ranks):
    assert all(ranks(3, _state_dicts))
