"""Cells call torch.distributed itself: there too, ranks that make different calls are told before anything is sent."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

from fsdp_ref import collectives, fully_shard, guard
from fsdp_ref.errors import RankError
from tests.engine.toys import toy, train


def _swapped(rank, world):
    grad_a, grad_b = torch.ones(4), torch.full((4,), 10.0)
    for t in (grad_b, grad_a) if rank == 1 else (grad_a, grad_b):
        dist.all_reduce(t)


def _branch(rank, world):
    layer = torch.nn.Linear(2, 2, bias=False)
    if rank == 1:
        dist.all_reduce(layer.weight.data)
    else:
        dist.all_reduce(layer.weight.data.T.contiguous())


def _sizes(rank, world):
    out = [torch.empty(3) for _ in range(world)]
    dist.all_gather(out, torch.ones(2 + (rank == 1)))


def _operations(rank, world):
    x = torch.ones(2)
    dist.broadcast(x, src=0) if rank == 1 else dist.all_reduce(x)


def _roots(rank, world):
    dist.broadcast(torch.ones(2), src=rank)


def _sum_or_max(rank, world):
    x = torch.ones(2)
    dist.all_reduce(x, op=dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)


def _saving_on_one(rank, world):
    x = torch.ones(2)
    if rank == 0:
        dist.barrier()
    dist.all_reduce(x)


WRONG = [(_swapped, "all-reduce of grad_a.*all-reduce of grad_b"), (_branch, r"dist.all_reduce\(layer.weight.data\)"),
         (_sizes, "another number of elements: 2 and 3"), (_operations, "all-reduce of x.*broadcast"), (_roots, "src 0.*src 1"),
         (_sum_or_max, "another reduction: (sum and max|max and sum)"), (_saving_on_one, "barrier.*all-reduce of x")]


def _told(rank, world, program):
    before = {name: getattr(dist, name) for name in guard.RULES if hasattr(dist, name)}
    guard.install()
    try:
        with collectives.check_calls():
            program(rank, world)
    except RankError as error:
        return str(error)
    finally:
        for name, function in before.items():
            setattr(dist, name, function)
    return ""


@pytest.mark.parametrize(("program", "words"), WRONG, ids=[program.__name__[1:] for program, _ in WRONG])
def test_a_disagreement_is_told(ranks, program, words):
    first, second = ranks(2, _told, program)
    assert first == second and re.search(words, first) and "test_guard.py, in " + program.__name__ in first, first


def _right(rank, world):
    """Calls that are right although lines, names or sizes differ: nobody is disturbed."""
    x = torch.full((2,), float(rank))
    if rank == 0:
        dist.broadcast(torch.ones(2), src=0)
    else:
        dist.broadcast(x, src=0)
    dist.all_reduce(x)
    gathered = [torch.empty(2) for _ in range(world)] if rank == 0 else None
    dist.gather(x, gathered, dst=0)
    dist.barrier()
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    group = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(x, group=group)
    if rank == 2:
        dist.send(x, dst=0)
    if rank == 0:
        dist.recv(x, src=2)
    results = train(fully_shard(toy()), rank)
    assert results and objects == [{"rank": r} for r in range(world)] and not collectives._somebody_watches()


def test_right_programs_are_left_alone(ranks):
    assert ranks(3, _told, _right) == [""] * 3
