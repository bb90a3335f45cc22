"""Bytes that leave a rank: counted where they leave, equal to what the formulas say."""

import pytest
import torch
import torch.distributed as dist

from fsdp_ref import collectives, ledger, wire
from fsdp_ref.collectives import Label
from fsdp_ref.lab.sent import sent_bytes


def _count(rank, world, check):
    x, piece, group = torch.ones(12 * world), torch.ones(12), dist.group.WORLD
    send, found = wire._send, {}
    for name, call in {"all-reduce": lambda: collectives.all_reduce(x, group, Label("x")),
                       "reduce-scatter": lambda: collectives.reduce_scatter(piece, x, group, Label("x")),
                       "all-gather": lambda: collectives.all_gather(x, piece, group, Label("x"))}.items():
        with collectives.check_calls(check), sent_bytes() as sent:
            call().wait()
        found[name] = sum(sent), ledger.wire_bytes(name, x.nbytes, world)
    return found, wire._send is send


@pytest.mark.parametrize("world", [2, 3])
def test_the_count_is_what_the_formula_says(ranks, world):
    for found, restored in ranks(world, _count, False):
        assert all(counted == formula for counted, formula in found.values()) and restored


def test_a_check_sends_sixteen_bytes_to_each_other_rank(ranks):
    for found, _ in ranks(3, _count, True):
        assert all(counted == formula + 16 * 2 for counted, formula in found.values())
