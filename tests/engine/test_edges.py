"""Edges found by trying to break the engine: each once gave wrong numbers, silently or late."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_ref.engine import FSDPModule, MixedPrecisionPolicy, data_parallel, fully_shard
from fsdp_ref.placements import DDP, ZERO3
from tests.engine.toys import batch, loss_of, toy


class Twice(nn.Module):
    """One layer is used twice in a forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.again = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.again(self.again(self.first(x))).square().mean()


def _ddp_accumulates(rank, world, factor, pattern):
    model, reference = Twice(), Twice()
    data_parallel(model, DDP, units=[model.again])
    for module in model.modules():
        if isinstance(module, FSDPModule) and factor:
            module.set_gradient_divide_factor(factor)
    inputs = [[torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * r + i)) for i in range(len(pattern))]
              for r in range(world)]
    for i, sync in enumerate(pattern):
        model.set_requires_gradient_sync(sync)
        model(inputs[rank][i]).backward()
    for mine in inputs:
        for x in mine:
            (reference(x) / (factor or world)).backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda m, name=name: f"{name}: {m}")
    return True


@pytest.mark.parametrize(("factor", "pattern"), [
    (None, (True, True)), (None, (True, True, True)), (None, (False, True)), (None, (False, True, True)), (None, (True, False, True)),
    (1.0, (True, True)), (1.0, (False, True))])
def test_ddp_accumulates_whatever_is_synced_when(ranks, factor, pattern):
    assert all(ranks(2, _ddp_accumulates, factor, pattern))


def _ddp_cut_short(rank, world):
    """The backward stops after the last layers have been reduced; nothing of it may reach the next step."""
    model, reference = toy(layers=6), toy(layers=6)
    data_parallel(model, DDP)
    data_parallel(reference, DDP)

    def stop(*_):
        raise ZeroDivisionError

    handle = model.blocks[0].register_full_backward_hook(stop)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, batch(0, rank)).backward()
    handle.remove()
    model.reset_iter_state()
    model.zero_grad()
    for each in (model, reference):
        loss_of(each, batch(1, rank)).backward()
    return all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_ddp_forgets_a_backward_that_was_cut_short(ranks):
    assert all(ranks(2, _ddp_cut_short))


def _ddp_replaced(rank, world):
    grads = []
    for change in ("double", "assign", "meta"):
        with torch.device("meta" if change == "meta" else "cpu"):
            model = toy()
        data_parallel(model, DDP)
        if change == "double":
            model.double()
        elif change == "assign":
            model.load_state_dict({name: value.clone() for name, value in toy().state_dict().items()}, assign=True)
        else:
            model.to_empty(device="cpu")
            model.load_state_dict(toy().state_dict())
        loss_of(model, batch(0, rank)).backward()
        grads.append(model.head.weight.grad)
    sum_of_ranks = [grad.clone() for grad in grads]
    for grad in sum_of_ranks:
        torch.distributed.all_reduce(grad)
    assert grads[0].dtype == torch.float64
    return all(torch.allclose(total, world * grad) for total, grad in zip(sum_of_ranks, grads, strict=True))      # equal everywhere


def test_ddp_follows_parameters_that_are_replaced_or_retyped(ranks):
    assert all(ranks(2, _ddp_replaced))


def _hooks_on_shards(rank, world):
    model = toy()
    data_parallel(model, ZERO3)
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

    def step_now(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    before = model.head.weight.full_tensor().clone()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step_now)
    loss_of(model, batch(0, rank)).backward()
    return not torch.equal(model.head.weight.full_tensor(), before) and model.head.weight.grad is None


def test_an_optimizer_that_steps_inside_backward(ranks):
    assert all(ranks(2, _hooks_on_shards))


def _mutable(rank, world):
    class Cached(nn.Linear):
        def forward(self, x, cache, *, more):
            cache.append(x.detach())
            more["seen"] = True
            return super().forward(x)

    model, cache, more = fully_shard(Cached(4, 4)), [torch.zeros(1)], {"inner": [torch.ones(1)]}
    model(torch.ones(2, 4), cache, more=more)
    return len(cache) == 2 and more["seen"]


def test_forward_may_write_into_its_arguments(ranks):
    assert all(ranks(2, _mutable))


def _mixed(rank, world):
    model = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4))
    model.forward = lambda x: model[1](model[0](x.bfloat16()).float()).square().mean()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    torch.manual_seed(rank)
    model(torch.randn(8, 4)).backward()
    grad = model[1].weight.grad.full_tensor()
    assert model[0].weight.grad.dtype == torch.bfloat16 and grad.dtype == torch.float32
    return not torch.equal(grad, grad.bfloat16().float())


def test_fp32_gradients_beside_bf16_ones_stay_fp32(ranks):
    assert all(ranks(2, _mixed))


def _early_unshard(rank, world):
    model = toy()
    data_parallel(model, ZERO3)
    model.blocks[1].set_is_last_backward(True)
    handle = model.blocks[1].unshard(async_op=True)
    handle.wait()
    assert model.blocks[1].up.weight.shape == (10, 6) and torch.equal(model.blocks[1].up.weight, toy().blocks[1].up.weight)
    loss_of(model, batch(0, rank)).backward()
    return all(param.grad is not None for param in model.parameters())


def test_a_child_may_be_gathered_before_the_first_forward(ranks):
    assert all(ranks(2, _early_unshard))


def _fp16(rank, world):
    def run(apply, policy):
        torch.manual_seed(0)
        model = nn.Linear(4, 4, bias=False)
        apply(model, mesh=init_device_mesh("cpu", (world,)), mp_policy=policy(param_dtype=torch.float16, reduce_dtype=torch.float16))
        (model(torch.full((1, 4), 200.0)) * 200.0).sum().backward()
        return model.weight.grad.to_local()

    ours, theirs = run(fully_shard, MixedPrecisionPolicy), run(torch_fully_shard, TorchPolicy)
    return (torch.isfinite(ours).all().item() or world > 3) and torch.equal(ours, theirs)     # 4 * 20000 is too much for both


@pytest.mark.parametrize("world", [2, 3, 4])
def test_fp16_reductions_divide_before_they_overflow(ranks, world):
    assert all(ranks(world, _fp16))
