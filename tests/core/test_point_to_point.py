"""Send and receive: a ring made of them is an all-gather; both sides are in the ledger; a peer that never sends is told."""

import time

import pytest
import torch

from fsdp_ref import collectives, ledger
from fsdp_ref.collectives import Label
from fsdp_ref.errors import ConfigError, RankError
from fsdp_ref.ledger import Lane
from fsdp_ref.point_to_point import receive, send

LABEL = Label("ring", "lesson")


def round_a_ring(rank, world):
    pieces = [torch.full((3,), float(rank))] * world
    with ledger.record() as book:
        for step in range(world - 1):
            mine, theirs = pieces[(rank - step) % world], torch.empty(3)
            going = send(mine, (rank + 1) % world, label=LABEL)
            receive(theirs, (rank - 1) % world, label=LABEL).wait()
            going.wait()
            pieces[(rank - step - 1) % world] = theirs
    return torch.cat(pieces), [event for event in book.events if event.lane is Lane.SEND]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_ring_is_an_all_gather_and_both_sides_are_recorded(ranks, world):
    for gathered, events in ranks(world, round_a_ring):
        assert gathered.tolist() == [float(rank) for rank in range(world) for _ in range(3)]
        assert sorted(event.name for event in events) == ["receive"] * (world - 1) + ["send"] * (world - 1)
        facts = {(event.bytes, event.unit, event.phase, event.group_size, event.sequence) for event in events}
        assert facts == {(12, "ring", "lesson", 1, -1)}
        assert sum(event.wire_bytes for event in events) == 12 * (world - 1), "what is sent counts, what is received does not"
        assert all(event.start <= event.end for event in events)


def over_a_slow_link(rank, world):
    with collectives.emulate(bandwidth=1e4, latency=0.1):
        begin = time.perf_counter()
        message = torch.zeros(500)
        (send(message, 1) if rank == 0 else receive(message, 0)).wait()
        return time.perf_counter() - begin


def test_an_emulated_link_holds_a_message_on_both_sides(ranks):
    assert min(ranks(2, over_a_slow_link)) >= 0.1 + 2000 / 1e4


def wrong(rank, world):
    with pytest.raises(ConfigError, match=f"rank {rank} cannot send to rank {rank}; choose one of the others"):
        send(torch.ones(1), rank)
    with pytest.raises(ConfigError, match="cannot receive from rank 7"):
        receive(torch.ones(1), 7)
    with pytest.raises(ConfigError, match=r"contiguous tensor.*\(4, 2\) and stride \(1, 4\)"):
        send(torch.ones(2, 4).t(), 1 - rank)


def test_a_peer_that_cannot_be_is_one_clear_error(ranks):
    ranks(2, wrong)


def never_sent(rank, world):
    if rank == 1:
        return ""
    try:
        receive(torch.empty(4), 1, label=LABEL).wait()
    except RankError as error:
        return str(error)


def test_a_peer_that_never_sends_is_named_within_the_limit(ranks):
    told = ranks(2, never_sent, timeout=3)[0]
    assert "rank 1" in told and "receive from rank 1 of ring (lesson)" in told
