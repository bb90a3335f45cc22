"""The CPU's wire: sums in rank order, the bytes the formulas say, an emulated link, and failures that reach whoever waits."""

import gc
import time
import weakref

import pytest
import torch
import torch.distributed as dist

from fsdp_ref import collectives, ledger
from fsdp_ref.collectives import Label
from fsdp_ref.errors import ConfigError, RankError

LABEL = Label("block", "forward")
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64]


def numbers(rank, count, dtype):
    values = torch.randn(count, generator=torch.Generator().manual_seed(rank)) * 100
    return values.to(dtype)


def _sums(rank, world, dtype, op):
    group, found = dist.group.WORLD, []
    for width in (1, 5, 64):
        source = numbers(rank, width * world, dtype)
        output = torch.empty(width, dtype=dtype)
        collectives.reduce_scatter(output, source.clone(), group, LABEL, op=op).wait()
        own = source.clone()
        collectives.reduce_scatter(own.view(world, width)[rank], own, group, LABEL, op=op).wait()          # into its own row
        whole = source.clone()
        collectives.all_reduce(whole, group, LABEL, op=op).wait()
        odd = source[:-1].clone() if width > 1 else source.clone()                                         # does not divide
        collectives.all_reduce(odd, group, LABEL, op=op).wait()
        expected = numbers(0, width * world, dtype)
        for other in range(1, world):
            expected = expected + numbers(other, width * world, dtype)
        expected = expected / world if op == dist.ReduceOp.AVG else expected
        mine = expected.view(world, width)[rank]
        found.append(torch.equal(output, mine) and torch.equal(own.view(world, width)[rank], mine) and torch.equal(whole, expected)
                     and torch.equal(odd, expected[: len(odd)]))
    return all(found)


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG], ids=["sum", "mean"])
@pytest.mark.parametrize("dtype", DTYPES[:4], ids=str)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_sums_are_taken_in_rank_order(ranks, world, dtype, op):
    """Bit for bit r0 + r1 + r2 + ..., wherever a number stands, in any dtype: the arithmetic of one process."""
    assert all(ranks(world, _sums, dtype, op))


def _routes(rank, world):
    group, results = dist.group.WORLD, []
    for name in ("direct", "library"):
        with collectives.route(name):
            gathered, scattered, summed = torch.empty(3 * world), torch.empty(3), numbers(rank, 7, torch.float32)
            collectives.all_gather(gathered, numbers(rank, 3, torch.float32), group, LABEL).wait()
            collectives.reduce_scatter(scattered, numbers(rank, 3 * world, torch.float32), group, LABEL).wait()
            collectives.all_reduce(summed, group, LABEL).wait()
            largest = numbers(rank, 4, torch.float32)
            collectives.all_reduce(largest, group, LABEL, op=dist.ReduceOp.MAX).wait()                     # the wire knows no maximum
            results.append((gathered, scattered, summed, largest))
    return results


@pytest.mark.parametrize("world", [2, 4])
def test_both_routes_give_the_same(ranks, world):
    for direct, library in ranks(world, _routes):
        for ours, gloos in zip(direct, library, strict=True):
            assert torch.equal(ours, gloos) if world == 2 else torch.allclose(ours, gloos, rtol=0, atol=4 * 400 * 2**-23)
        assert torch.equal(direct[0], library[0]) and torch.equal(direct[3], library[3])


def _empty(rank, world):
    output = torch.empty(0)
    collectives.all_gather(output, torch.empty(0), dist.group.WORLD, LABEL).wait()
    collectives.reduce_scatter(torch.empty(0), torch.empty(0), dist.group.WORLD, LABEL).wait()
    return True


def test_messages_of_no_bytes(ranks):
    assert all(ranks(3, _empty))


def _slow(rank, world, overlap):
    """Four all-gathers of 1 MB on a link of 20 MB/s; each rank sends half of each: 25 ms."""
    group, spent = dist.group.WORLD, time.process_time()
    with collectives.emulate(bandwidth=20e6, latency=0.005), ledger.record() as book:
        pending = []
        for _ in range(4):
            output, shard = torch.empty(1_000_000, dtype=torch.uint8), torch.ones(500_000, dtype=torch.uint8)
            pending.append(collectives.all_gather(output, shard, group, LABEL))
        deadline = time.monotonic() + 20
        while overlap and sum(e.lane == "all-gather" for e in book.events) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)                                # "compute", for longer than the messages take on however busy a machine
        for each in pending:
            each.wait()
    spent = time.process_time() - spent
    moved = sorted((e.on_wire, e.end) for e in book.events if e.lane == "all-gather")
    return moved, sum(e.seconds for e in book.events if e.lane == "wait"), spent


def test_an_emulated_link_takes_its_time_and_queues(ranks):
    moved, waited, _ = ranks(2, _slow, False)[0]
    assert all(end - begin >= 0.030 for begin, end in moved), "latency and bytes over bandwidth"
    assert all(later[0] >= earlier[1] for earlier, later in zip(moved, moved[1:], strict=False)), "one message at a time"
    assert waited >= 0.1


def test_what_overlaps_with_compute_is_hidden(ranks):
    moved, waited, _ = ranks(2, _slow, True)[0]
    assert len(moved) == 4 and sum(end - begin for begin, end in moved) >= 0.12 and waited < 0.06, "of 0.12 s on the link"


def _after(rank, world):
    with collectives.emulate(bandwidth=1e3):
        pass
    with ledger.record() as book:
        collectives.all_gather(torch.empty(100_000 * world), torch.ones(100_000), dist.group.WORLD, LABEL).wait()
    return max(e.seconds for e in book.events)


def test_the_link_is_fast_again_afterwards(ranks):
    assert max(ranks(2, _after)) < 30                       # the emulated link would have taken 200 s


@pytest.mark.parametrize("bandwidth, latency", [(0, 0), (-1, 0), (1e6, -0.1), (float("nan"), 0)])
def test_links_that_cannot_exist(bandwidth, latency):
    with pytest.raises(ConfigError, match="cannot exist"), collectives.emulate(bandwidth, latency):
        pass


def test_a_route_that_does_not_exist():
    with pytest.raises(ConfigError, match="no route"), collectives.route("scenic"):
        pass


def _what_is_left(rank, world):
    """Who failed must not stay in memory: the model and its step are in the frames that the error went through."""
    class Step:
        pass

    def fail():
        step = Step()
        with pytest.raises(RankError):
            collectives.all_gather(torch.empty(8), torch.ones(4), dist.group.WORLD, LABEL).wait()
        return weakref.ref(step)

    if rank == 1:
        time.sleep(5)
        return True
    left = fail()
    gc.collect()
    return left() is None


def test_a_failed_message_keeps_nothing_alive(ranks):
    assert all(ranks(2, _what_is_left, timeout=1.0))


def _fails_fast(rank, world):
    """After one message has failed, those behind it fail at once and do not wait for their own time limit each."""
    if rank == 1:
        time.sleep(5)
        return 0.0
    group, begin = dist.group.WORLD, time.monotonic()
    pending = [collectives.all_gather(torch.empty(8), torch.ones(4), group, LABEL) for _ in range(4)]
    for each in pending:
        with pytest.raises(RankError):
            each.wait()
    return time.monotonic() - begin


def test_messages_behind_a_failed_one_fail_with_it(ranks):
    limit, grace = 1.0, 3.0                                 # of the group; of explain_failure, each time it asks who was missing
    assert max(ranks(2, _fails_fast, timeout=limit)) < limit + 4 * grace + 1.5
