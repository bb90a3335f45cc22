"""The collectives: values, labels, recorded bytes, and the rank named when one is missing."""

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from fsdp_ref import collectives, ledger, world
from fsdp_ref.collectives import Label
from fsdp_ref.errors import RankError

LABEL = Label("block", "forward")


def _values(rank, world):
    group = dist.group.WORLD
    gathered = torch.empty(2 * world)
    collectives.all_gather(gathered, torch.tensor([2.0 * rank, 2.0 * rank + 1]), group, LABEL).wait()
    source = torch.arange(2.0 * world) + 10 * rank
    scattered = torch.empty(2)
    collectives.reduce_scatter(scattered, source, group, LABEL, op=dist.ReduceOp.SUM).wait()
    summed = torch.full((3,), float(rank))
    collectives.all_reduce(summed, group, LABEL).wait()
    return gathered, scattered, summed, collectives.gather_json({"rank": rank, "pad": "x" * rank})


@pytest.mark.parametrize("world", [2, 3, 4])
def test_values(ranks, world):
    for rank, (gathered, scattered, summed, notes) in enumerate(ranks(world, _values)):
        assert gathered.tolist() == list(range(2 * world))
        assert scattered.tolist() == [world * x + 10 * sum(range(world)) for x in (2.0 * rank, 2.0 * rank + 1)]
        assert summed.tolist() == [(world - 1) / 2] * 3
        assert notes == [{"rank": r, "pad": "x" * r} for r in range(world)]


def _recorded(rank, world):
    with ledger.record() as book:
        out = torch.empty(8 * world)
        collectives.all_gather(out, torch.ones(8), dist.group.WORLD, LABEL).wait()
        collectives.all_reduce(torch.ones(8), dist.group.WORLD, LABEL).wait()
    return collectives.gather_ledgers(book)


def test_every_collective_is_recorded_on_every_rank(ranks):
    book = ranks(3, _recorded)[1]
    for rank in range(3):
        rows = {e.name: e for e in book.events if e.rank == rank and e.lane != "wait"}
        assert rows["all-gather"].bytes == 8 * 3 * 4 and rows["all-reduce"].bytes == 8 * 4
        assert rows["all-gather"].wire_bytes == 64 and rows["all-reduce"].wire_bytes == pytest.approx(2 * 32 * 2 / 3)
        assert rows["all-gather"].unit == "block" and rows["all-gather"].group_size == 3
        assert rows["all-gather"].sequence < rows["all-reduce"].sequence
        assert all(e.start <= e.end for e in rows.values())
    assert ledger.Ledger.from_json(book.to_json()) == book


def test_a_store_that_does_not_answer_is_given_up(monkeypatch):
    """The machine that keeps it is cut off: torch would wait for as long as TCP does."""
    released = threading.Event()

    class Deaf:
        def set(self, key, value):
            released.wait(30)

    monkeypatch.setattr(world, "GRACE", 0.1)
    monkeypatch.setattr(world, "_world", world.World(0, 2, torch.device("cpu"), "gloo", Deaf(), 0.1, Deaf()))
    told = world.explain_failure(RuntimeError("Timed out"), "all-gather of block 1", 7)
    assert not released.is_set() and "the store in which the others would say why is gone too (Timed out)" in str(told)
    released.set()


def _absent(rank, world):
    if rank == 1:
        time.sleep(6)
        return "elsewhere"
    with pytest.raises(RankError) as caught:
        collectives.all_reduce(torch.ones(4), dist.group.WORLD, LABEL).wait()
    return str(caught.value)


def test_a_rank_that_never_comes_is_named(ranks):
    told = ranks(3, _absent, timeout=2.0)
    for rank in (0, 2):
        assert told[rank].startswith("rank 1 never arrived at all-reduce of block (forward)"), told[rank]


def _dies(rank, world):
    if rank == 2:
        os._exit(9)
    begin = time.monotonic()
    try:
        collectives.all_reduce(torch.ones(4), dist.group.WORLD, LABEL).wait()
    except RankError as error:
        return str(error), time.monotonic() - begin


def test_a_rank_that_dies_is_named_at_once(ranks):
    from concurrent.futures.process import BrokenProcessPool
    with pytest.raises(BrokenProcessPool):
        ranks(3, _dies)
    assert ranks(2, _values)          # the pool heals
