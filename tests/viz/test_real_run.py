"""Pictures of a real run: small model, real ranks, DDP and ZeRO-3; the tables agree with the ledger and with arithmetic."""

import gc

import pytest
import torch
from torch import nn

from fsdp_ref import collectives, ledger, viz
from fsdp_ref.engine import data_parallel
from fsdp_ref.ledger import Ledger
from fsdp_ref.placements import DDP, ZERO3

pytestmark = pytest.mark.slow

WIDTH = 32


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH)) for _ in range(3)),
                         nn.Linear(WIDTH, 5))


def _record(rank, world, name):
    placements = {"DDP": DDP, "ZeRO-3": ZERO3}[name]
    model = _model()
    model = data_parallel(model, placements, units=[model[0], model[1], model[2]])
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.randn(16, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()                       # the first step names the units and makes the optimizer's state
    gc.collect()                 # the model of an earlier call on this rank must be off the books
    with ledger.record() as mine:
        collectives.barrier()    # the ranks start the step together, so that it shows the step and not the recording's start
        with ledger.mark("step 1"):
            step()
    return collectives.gather_ledgers(mine).to_json()


@pytest.fixture(scope="module")
def recorded(ranks) -> dict[str, Ledger]:
    return {name: Ledger.from_json(ranks(3, _record, name)[0]).window("step 1") for name in ("DDP", "ZeRO-3")}


def test_the_shard_map_counts_every_element(recorded):
    elements = sum(p.numel() for p in _model().parameters())
    for name, copies in (("DDP", 3), ("ZeRO-3", 1)):
        total = next(row for row in viz.shard_map(recorded[name]).table if row["unit"].startswith("all held"))
        assert sum(total[f"rank {rank}"] for rank in range(3)) * 1024 == copies * elements * 4


def test_the_timeline_shows_every_rank_and_its_communication(recorded):
    for name, lane in (("DDP", "all-reduce"), ("ZeRO-3", "all-gather")):
        picture = viz.step_timeline(recorded[name])
        assert [row["rank"] for row in picture.table] == [0, 1, 2]
        assert lane in [text.get_text() for text in picture.figure.axes[0].texts]
        assert all(row["overlap %"] is not None for row in picture.table)


def test_memory_falls_from_ddp_to_zero3(recorded):
    last = viz.memory_over_step(recorded).table[-1]
    ddp, zero3 = (value for key, value in last.items() if key != "category")
    assert zero3 < ddp
    assert recorded["DDP"].peak_bytes(0) > recorded["ZeRO-3"].peak_bytes(0)
