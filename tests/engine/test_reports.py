"""Public bug reports about wrong training numbers, each as a test of its kind of fault. B05 is tested in tests/core/test_agreement.py."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_ref import MixedPrecisionPolicy, data_parallel, fully_shard
from fsdp_ref.placements import DDP, ZERO1, ZERO2, ZERO3
from tests.engine.toys import batch, loss_of, toy

ROWS = {"ddp": DDP, "zero1": ZERO1, "zero2": ZERO2, "zero3": ZERO3}


class Beside(nn.Module):
    """A toy, and a matrix that every rank holds alike."""

    def __init__(self):
        super().__init__()
        self.toy, self.whole = toy(dtype=torch.float64), nn.Parameter(torch.eye(17, dtype=torch.float64))

    def forward(self, tokens):
        return self.toy(tokens) @ self.whole


def _norms(rank, world, foreach):
    model, plain = Beside(), Beside()
    fully_shard(model.toy.blocks[0])
    fully_shard(model, ignored_params={model.whole} if foreach is None else None)
    empty = [isinstance(p, DTensor) and p.to_local().numel() == 0 for p in model.parameters()]
    assert any(empty) is (rank > 0), "gain has one row, and rank 0 has it"
    for norm_type in (1.0, 2.0, 3.0, math.inf):
        for each in (model, plain):
            each.zero_grad()
            loss_of(each, batch(0, 0)).backward()
        flat = torch.cat([p.grad.flatten() for p in plain.parameters()])
        expected = torch.linalg.vector_norm(flat, norm_type)
        for each in (model, plain):
            found = torch.nn.utils.clip_grad_norm_(each.parameters(), expected.item() / 2, norm_type, foreach=foreach)
            torch.testing.assert_close(found.full_tensor() if isinstance(found, DTensor) else found, expected)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad.full_tensor() if isinstance(a, DTensor) else a.grad, b.grad)
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("world", [2, 4])
def test_b01_f12_the_norm_is_of_all_ranks_for_every_order_with_empty_shards_and_whole_parameters(ranks, world, foreach):
    """pytorch#88621, #170862: the norm of one rank's part was used; and an empty shard has no infinity norm."""
    assert all(ranks(world, _norms, foreach))


PATTERNS = list(itertools.product((True, False), repeat=3))


def _accumulates(rank, world, row):
    """Whatever is synced when, four micro-batches are one batch, and a second step follows from the first."""
    losses, grads = {}, {}
    for pattern in PATTERNS:
        model = toy(dtype=torch.float64)
        data_parallel(model, ROWS[row])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            for micro, sync in enumerate((*pattern, True)):
                model.set_requires_gradient_sync(sync)
                (loss_of(model, batch(4 * step + micro, rank)) / 4).backward()
            optimizer.step()
            grads[pattern, step] = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone() for p in model.parameters()]
            optimizer.zero_grad()
        losses[pattern] = loss_of(model, batch(9, 0)).item()
    reference, optimizer = toy(dtype=torch.float64), None
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(2):
        sum(loss_of(reference, batch(4 * step + micro, r)) / (4 * world) for micro in range(4) for r in range(world)).backward()
        for pattern in PATTERNS:
            for a, p in zip(grads[pattern, step], reference.parameters(), strict=True):
                torch.testing.assert_close(a, p.grad, rtol=1e-11, atol=1e-13, msg=lambda m, pattern=pattern: f"{pattern}: {m}")
        optimizer.step()
        optimizer.zero_grad()
    assert all(loss == pytest.approx(loss_of(reference, batch(9, 0)).item(), rel=1e-12) for loss in losses.values())
    return True


@pytest.mark.parametrize("row", ROWS)
def test_b03_micro_batches_are_one_batch_for_every_pattern_of_sync(ranks, row):
    """build-nanogpt PR#30, DeepSpeed PR#6550, pytorch PR#73535: gradients of some micro-batches were lost or counted twice."""
    assert all(ranks(2, _accumulates, row))


def _token_mean(rank, world):
    """Ranks and micro-batches with 3, 7, 1, 5 and no counted tokens: the sum over all, divided by the count of all."""
    counts = [[3, 7, 0], [1, 5, 2]]
    total = sum(map(sum, counts))
    targets = {r: [batch(micro, r, size=(2, 9)) for micro in range(3)] for r in range(world)}

    def summed(model, tokens, counted):
        losses = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return losses[:counted].sum()

    model, reference = toy(dtype=torch.float64), toy(dtype=torch.float64)
    fully_shard(model)
    model.set_gradient_divide_factor(1.0)                   # a sum over ranks: the division is by tokens
    for micro, tokens in enumerate(targets[rank]):
        model.set_requires_gradient_sync(micro == 2)
        (summed(model, tokens, counts[rank][micro]) / total).backward()
    for r in range(world):
        for micro, tokens in enumerate(targets[r]):
            (summed(reference, tokens, counts[r][micro]) / total).backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=1e-11, atol=1e-13)
    return True


def test_b04_gradients_do_not_depend_on_how_tokens_are_spread(ranks):
    """torchtune PR#1875, OpenNMT-py#2209, mlx-lm PR#1413: a mean of means weighs tokens of short batches more."""
    assert all(ranks(2, _token_mean))


def _small_updates(rank, world):
    """bf16 compute; 200 steps of 1e-4 on a weight of 1.0: each is below what bf16 can tell apart there (0.0039)."""
    layer = nn.Linear(4, 4, bias=False)
    nn.init.ones_(layer.weight)
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-4, weight_decay=0.0)
    for _ in range(200):
        layer(torch.ones(2, 4)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state[layer.weight]
    assert {layer.weight.dtype, state["exp_avg"].dtype, state["exp_avg_sq"].dtype} == {torch.float32}
    return layer.weight.full_tensor().mean().item()


def test_b11_masters_and_moments_stay_fp32_under_bf16_compute(ranks):
    """AReaL#1292, apex PR#1731: an optimizer over low-precision weights rounds small updates away."""
    assert ranks(2, _small_updates)[0] == pytest.approx(1.0 - 0.02, abs=1e-4)


def _infinite(rank, world):
    """One infinite number on rank 1: every rank learns of it from the norm; a norm of zero scales nothing."""
    model = fully_shard(toy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss_of(model, batch(0, rank)).backward()
    if rank == 1:
        model.head.weight.grad.to_local()[0, 0] = math.inf
    before = [p.to_local().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert all(torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters(), strict=True)) and not optimizer.state
    for param in model.parameters():
        param.grad.zero_()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return norm.full_tensor().item() == 0.0 and all(not p.grad.to_local().any() for p in model.parameters())


def test_b13_a_number_that_is_not_finite_is_told_on_every_rank_and_zero_changes_nothing(ranks):
    """DeepSpeed PR#8614, #5223: a non-finite norm became a negative factor; an all-zero gradient an assertion."""
    assert all(ranks(2, _infinite))
