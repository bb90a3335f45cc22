"""Ranks that make different calls are told, with rank, call and line, before anything is sent; and where a rank is that never came."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist

from fsdp_ref import collectives, fingerprint, fully_shard
from fsdp_ref.collectives import Label
from fsdp_ref.errors import RankError
from tests.engine.toys import batch, loss_of, toy, train


def _reduce(name, values, dtype=torch.float32, op=dist.ReduceOp.AVG):
    tensor = torch.tensor(values, dtype=dtype)
    collectives.all_reduce(tensor, dist.group.WORLD, Label(name, "step"), op=op).wait()
    return tensor.tolist()


def _swapped(rank, world):
    first, second = (("a", [1.0, 2.0]), ("b", [10.0, 20.0]))[:: -1 if rank == 1 else 1]
    _reduce(*first)
    _reduce(*second)


def _unequal(rank, world):
    _reduce("a", [1.0] * (3 if rank == 1 else 2))


def _retyped(rank, world):
    _reduce("a", [1.0], torch.bfloat16 if rank == 1 else torch.float32)


def _summed(rank, world):
    _reduce("a", [1.0], op=dist.ReduceOp.SUM if rank == 1 else dist.ReduceOp.AVG)


def _twice(rank, world):
    _reduce("a", [1.0])
    if rank == 1:
        _reduce("a", [1.0])
    _reduce("b", [1.0])


def _other_operation(rank, world):
    if rank == 1:
        collectives.broadcast(torch.ones(2), dist.group.WORLD, Label("a", "step"))
    else:
        _reduce("a", [1.0, 2.0])


def _other_root(rank, world):
    collectives.broadcast(torch.ones(2), dist.group.WORLD, Label("a", "step"), source=int(rank == 1))


WRONG = [(_swapped, r"all-reduce of a in step \(avg\), 2 x float32, at line \d+ of test_fingerprint.py, in _reduce, called from line \d+ "
                    "of test_fingerprint.py, in _swapped, .*; rank 1: .*takes its calls in another order"),
         (_unequal, "another number of elements: . and ."), (_retyped, "another dtype: "), (_summed, "another reduction: "),
         (_twice, r"rank 1 made its last call a second time; line \d+ stands under `if rank == 1`"),
         (_other_operation, "rank 1: broadcast from 0 of a"),
         (_other_root, "ranks 0 and 2: broadcast from 0 of a.*rank 1: broadcast from 1 of a")]


def _told(rank, world, program, route):
    with collectives.check_calls(), collectives.route(route):
        try:
            program(rank, world)
        except RankError as error:
            assert not error.sent and _reduce("c", [float(rank)]) == [1.0], "the group goes on"
            return str(error)
    return ""


@pytest.mark.parametrize("route", ["direct", "library"])
@pytest.mark.parametrize(("program", "words"), WRONG, ids=[program.__name__[1:] for program, _ in WRONG])
def test_a_disagreement_is_told_before_anything_is_sent(ranks, program, words, route):
    told = ranks(3, _told, program, route)
    assert len(set(told)) == 1 and re.search(words, told[0], re.S), told[0]
    assert "ranks 0 and 2: " in told[0] and "nothing was sent" in told[0]


def _silent(rank, world):
    """What gloo does with the swap when nobody looks: a sum of both, in both places."""
    a, b = torch.tensor([1.0]), torch.tensor([10.0])
    for tensor in (b, a) if rank == 1 else (a, b):
        collectives.all_reduce(tensor, dist.group.WORLD, Label("x", "step"), op=dist.ReduceOp.SUM).wait()
    return a.item(), b.item()


def test_the_swap_goes_unnoticed_without_it(ranks):
    assert ranks(2, _silent) == [(11.0, 11.0)] * 2              # should be 2 and 20


def _trains(rank, world):
    plain, checked = fully_shard(toy()), fully_shard(toy())
    expected = train(plain, rank)
    with collectives.check_calls():
        assert train(checked, rank) == expected
        assert collectives.gather_json(rank) == list(range(world))
        with torch.no_grad():
            loss_of(checked, batch(0, rank))
    return len(fingerprint._last[dist.group.WORLD.group_name])


def test_ranks_that_agree_train_as_before(ranks):
    assert ranks(3, _trains) == [9] * 3                         # and were compared


def _absent(rank, world):
    if rank == 1:
        deadline = time.monotonic() + 6
        while time.monotonic() < deadline:
            time.sleep(0.01)                                    # elsewhere
        return ""
    with pytest.raises(RankError) as caught:
        _reduce("a", [1.0])
    return str(caught.value)


def test_a_rank_that_never_comes_is_told_with_its_line(ranks):
    told = ranks(2, _absent, timeout=1.0)[0]
    assert "rank 1 never arrived" in told and "rank 1 is at line" in told and "test_fingerprint.py, in _absent" in told, told
