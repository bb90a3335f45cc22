"""What the ledger's categories add up to, beside torch's own MemTracker, which counts every tensor's storage in a dispatch mode.

The ledger books what lasts: weights, gradients, moments, buffers of collectives, what is saved for backward. MemTracker counts the rest
too, as "Temp": results that live inside one operation of backward (here the gradient of the logits). So books + Temp = all there is.
"""

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from fsdp_ref import DDP, ZERO1, ZERO2, ZERO3, collectives, data_parallel, ledger, models
from fsdp_ref.ledger import Category
from fsdp_ref.placements import Placement
from tests.ranks import RankPool

BOUND = 0.01            # of the peak: the two may see it at another operation


@pytest.fixture(scope="module")
def ranks():
    """Processes of this file's own: MemTracker never lets go of the models it has tracked, and other tests count what is there."""
    pool = RankPool(2)
    yield pool
    pool.close()


def one_step(model, optimizer):
    tokens = torch.arange(8 * 32).view(8, 32)
    model.loss(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def both(rank, size, placements):
    """The ledger's peak and what it is made of; MemTracker's peak total and its share of temporary memory; bytes."""
    torch.manual_seed(0)
    with ledger.record() as earlier:                            # what MemTracker kept of the models before
        pass
    with collectives.route("library"):
        model = data_parallel(models.GPT(models.GPTConfig(dim=64, layers=4, context=32)), placements)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):                                      # every buffer and moment exists by the second step
            one_step(model, optimizer)
        with ledger.record(activations=True) as book:
            one_step(model, optimizer)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            one_step(model, optimizer)
    seen = {getattr(kind, "value", kind): nbytes for kind, nbytes in tracker.get_tracker_snapshot("peak")[torch.device("cpu")].items()}
    activations = sum(row.bytes for row in book.allocations if row.category is Category.ACTIVATION)
    mine = book.peak_bytes(rank) - sum(row.bytes for row in earlier.allocations)
    # With whole weights at rest, a shard is part of them (through DLPack, as a storage of its own): torch counts that memory twice.
    whole = placements.parameter is Placement.REPLICATE and placements.optimizer is Placement.SHARD
    twice = sum(parameter.to_local().nbytes for parameter in model.parameters()) if whole else 0
    return mine, activations, seen["Total"] - twice, seen["Temp"], seen["Activation"]


@pytest.mark.parametrize("placements", [DDP, ZERO1, ZERO2, ZERO3], ids=lambda row: row.name)
def test_the_books_and_temporary_memory_are_all_there_is(ranks, placements):
    for peak, activations, total, temporary, saved in ranks(2, both, placements):
        assert peak < total and abs(peak + temporary - total) < BOUND * total, (peak, temporary, total)
        assert abs(activations - saved) < 0.1 * saved, "what is saved for backward is most of what torch calls activations"
