"""The engine on GPUs, beside torch's: skipped where there is none. One rank a GPU, at most two."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_ref import collectives, engine, ledger
from fsdp_ref.engine import data_parallel
from fsdp_ref.ledger import Category, Lane
from fsdp_ref.placements import DDP, ZERO1, ZERO2, ZERO3
from tests.engine.toys import batch, loss_of, toy, train_with

GPUS = min(torch.cuda.device_count(), 2)
pytestmark = pytest.mark.skipif(GPUS == 0, reason="no GPU")
BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def _sharded(api, world, policy, offload):
    model, mesh = toy(), init_device_mesh("cuda", (world,))
    options = {"mesh": mesh, "mp_policy": api.MixedPrecisionPolicy(**policy)}
    if offload:
        options["offload_policy"] = api.CPUOffloadPolicy()
    for block in model.blocks:
        api.fully_shard(block, **options)
    return api.fully_shard(model, **options)


def _steps(model, rank, steps=3):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step, rank).cuda())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _beside_torch(rank, world, policy, offload):
    ours, theirs = (_sharded(api, world, policy, offload) for api in (engine, fsdp))
    assert _steps(ours, rank) == _steps(theirs, rank)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert isinstance(a, DTensor) and a.device.type == b.device.type == ("cpu" if offload else "cuda"), name
        assert torch.equal(a.to_local(), b.to_local()), name
    return True


@pytest.mark.parametrize("offload", [False, True], ids=["on-device", "offloaded"])
@pytest.mark.parametrize("policy", [{}, BF16], ids=["fp32", "bf16"])
def test_same_bits_as_torch(ranks, policy, offload):
    assert all(ranks(GPUS, _beside_torch, policy, offload, device="auto"))


def _ladder(rank, world):
    return [_steps(data_parallel(toy().cuda(), row), rank) for row in (DDP, ZERO1, ZERO2, ZERO3)]


def test_all_rows_give_the_same_losses(ranks):
    first, *others = ranks(GPUS, _ladder, device="auto")[0]
    for other in others:
        torch.testing.assert_close(other, first)


def _recorded(rank, world):
    """Times come from events on the streams, and buffers are given back."""
    model = data_parallel(toy().cuda(), ZERO3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with ledger.record() as book:
        loss_of(model, batch(0, rank).cuda()).backward()
        optimizer.step()
        torch.cuda.synchronize()
    assert all(event.end >= event.start for event in book.events)
    assert {Lane.COMPUTE} <= {event.lane for event in book.events}
    if world > 1:
        assert {Lane.ALL_GATHER, Lane.REDUCE_SCATTER} <= {event.lane for event in book.events}
        gathered = [a for a in book.allocations if a.category == Category.ALL_GATHER]
        assert gathered and all(a.end is not None for a in gathered)
    return True


def test_a_step_is_recorded(ranks):
    assert all(ranks(GPUS, _recorded, device="auto"))


def _hooked(rank, world):
    """A user's hook in a stream of its own, and an event for the gathers to wait for."""
    plain, hooked = (engine.fully_shard(toy(), mesh=init_device_mesh("cuda", (world,))) for _ in range(2))
    hooked.set_all_reduce_hook(lambda reduced: reduced.mul_(2), stream=torch.cuda.Stream())
    event = torch.cuda.Event()
    event.record()
    hooked.set_post_optim_event(event)
    for model in (plain, hooked):
        loss_of(model, batch(0, rank).cuda()).backward()
    for a, b in zip(plain.parameters(), hooked.parameters(), strict=True):
        torch.testing.assert_close(a.grad.to_local() * 2, b.grad.to_local())
    return True


def test_hooks_and_events_keep_to_their_streams(ranks):
    assert all(ranks(GPUS, _hooked, device="auto"))


def _gathers_facts(rank, world):
    return collectives.gather_json({"rank": rank})


def test_small_facts_travel_on_the_cpu(ranks):
    assert ranks(GPUS, _gathers_facts, device="auto")[0] == [{"rank": rank} for rank in range(GPUS)]


def test_a_toy_on_the_cpu_beside_it(ranks):
    assert ranks(GPUS, _on_cpu)[0]


def _on_cpu(rank, world):
    model = engine.fully_shard(toy(), mesh=init_device_mesh("cpu", (world,)))
    return train_with(torch.optim.AdamW(model.parameters(), lr=0.01), model, rank)
