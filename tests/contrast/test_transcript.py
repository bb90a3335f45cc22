"""The transcript hears torch's collectives with their bytes, and the same from both libraries; what differs is heard to differ."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_ref import fully_shard
from fsdp_ref.contrast import Transcript
from tests.engine.toys import batch, loss_of, toy


def _known(rank, world):
    mine = torch.ones(3)
    with Transcript() as wire:
        dist.all_gather_into_tensor(torch.empty(3 * world), mine)
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(2 * world))
        dist.all_reduce(mine)
    dist.all_reduce(mine)                                   # nobody listens any more
    return wire.rows


def test_names_and_bytes_of_collectives_by_hand(ranks):
    wanted = [("all-gather", 24), ("reduce-scatter", 16), ("all-reduce", 12)]
    assert ranks(2, _known) == [wanted, wanted]


def _step(rank, world, library, **options):
    shard = {"torch": torch_fully_shard, "ours": fully_shard}[library]
    model = toy()
    for block in model.blocks:
        shard(block, **options)
    shard(model)
    loss_of(model, batch(0, rank)).backward()
    with Transcript() as wire:
        loss_of(model, batch(1, rank)).backward()
    return wire.rows


def test_both_libraries_send_the_same_and_a_change_is_heard(ranks):
    ours, torchs = ranks(2, _step, "ours")[0], ranks(2, _step, "torch")[0]
    assert ours == torchs
    assert [name for name, _ in ours].count("reduce-scatter") == 4, "three blocks and the root"
    kept = ranks(2, _step, "ours", reshard_after_forward=False)[0]
    assert len(ours) - len(kept) == 3, "blocks that stay whole after forward are not gathered for backward"
