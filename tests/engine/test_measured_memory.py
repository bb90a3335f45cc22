"""What the ledger's categories add up to, beside torch's own MemTracker, which counts every tensor's storage in a dispatch mode.

A recording books what lasts: weights, gradients, moments, buffers of collectives, and if it is asked to, what is saved for backward.
MemTracker counts the rest too, as "Temp": results that live inside one operation of backward (here the gradient of the logits). A
recording of temporaries sees all there is, to the byte.
"""

from functools import partial

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

from fsdp_ref import DDP, ZERO1, ZERO2, ZERO3, collectives, data_parallel, ledger, models
from fsdp_ref.ledger import Category
from fsdp_ref.placements import Placement
from tests.ranks import RankPool

BOUND = 0.01            # of the peak: without temporaries, a unit's gradients are on the books before they are all there
EXACT = 0.002           # of the peak
BLOCK = 4 * (12 * 64 * 64 + 13 * 64)       # bytes of a block's gradients: matrices of attention and MLP, biases, norms


@pytest.fixture(scope="module")
def ranks():
    """Processes of this file's own: MemTracker never lets go of the models it has tracked, and other tests count what is there."""
    pool = RankPool(2)
    yield pool
    pool.close()


def one_step(model, optimizer, between=None):
    tokens = torch.arange(8 * 32).view(8, 32)
    model.loss(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def built(placements):
    torch.manual_seed(0)
    model = data_parallel(models.GPT(models.GPTConfig(dim=64, layers=4, context=32)), placements)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):                                          # every buffer and moment exists by the second step
        one_step(model, optimizer)
    return model, optimizer


def tracked(model, optimizer, step=one_step):
    """What MemTracker sees of one step at its peak, by kind; bytes."""
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step(model, optimizer, tracker.reset_mod_stats)
    return {getattr(kind, "value", kind): nbytes for kind, nbytes in tracker.get_tracker_snapshot("peak")[torch.device("cpu")].items()}


def both(rank, size, placements):
    """The ledger's peak and what it is made of; MemTracker's peak total and its share of temporary memory; bytes."""
    with ledger.record() as earlier:                            # what MemTracker kept of the models before
        pass
    with collectives.route("library"):
        model, optimizer = built(placements)
        with ledger.record(activations=True) as book:
            one_step(model, optimizer)
        with ledger.record(temporaries=True) as everything:
            one_step(model, optimizer)
        seen = tracked(model, optimizer)
    activations = sum(row.bytes for row in book.allocations if row.category is Category.ACTIVATION)
    before = sum(row.bytes for row in earlier.allocations)
    # A shard is part of a unit's one memory (through DLPack, as a storage of its own): torch counts that memory twice.
    twice = sum(p.to_local().nbytes for p in model.parameters()) if placements.optimizer is Placement.SHARD else 0
    mine = book.peak_bytes(rank) - before, everything.peak_bytes(rank) - before, activations
    return *mine, seen["Total"] - twice, seen["Temp"], seen["Activation"]


@pytest.mark.parametrize("placements", [DDP, ZERO1, ZERO2, ZERO3], ids=lambda row: row.name)
def test_the_books_and_temporary_memory_are_all_there_is(ranks, placements):
    for peak, everything, activations, total, temporary, saved in ranks(2, both, placements):
        assert peak < total < (1 + BOUND) * (peak + temporary), (peak, temporary, total)
        assert abs(everything - total) < EXACT * total, (everything, total)
        assert abs(activations - saved) < 0.1 * saved, "what is saved for backward is most of what torch calls activations"


def with_checkpoints(model, optimizer, between, reentrant):
    """A step in which every block's activations are computed a second time."""
    for block in model.blocks:
        block.forward = partial(checkpoint, partial(type(block).forward, block), use_reentrant=reentrant)
    try:
        one_step(model, optimizer)
    finally:
        for block in model.blocks:
            del block.forward


def in_micro_batches(model, optimizer, between):
    """Two backwards, the first without communication: whole gradients stand in between."""
    tokens = torch.arange(8 * 32).view(8, 32)
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        model.loss(tokens, tokens).backward()
        between()                                               # MemTracker wants to be told that a forward comes again
    optimizer.step()
    optimizer.zero_grad()


STEPS = {"recomputed": partial(with_checkpoints, reentrant=False), "recomputed, reentrant": partial(with_checkpoints, reentrant=True),
         "micro-batches": in_micro_batches, "optimizer": lambda model, optimizer, between: optimizer.step()}


def beside_torch(rank, size, name):
    """One kind of step: the ledger's peak and the rows behind it; MemTracker's peak; bytes."""
    with ledger.record() as earlier:
        pass
    with collectives.route("library"):
        model, optimizer = built(ZERO3)
        if name == "optimizer":
            tokens = torch.arange(8 * 32).view(8, 32)
            model.loss(tokens, tokens).backward()
        with ledger.record(temporaries=True) as book:
            STEPS[name](model, optimizer, lambda: None)
        seen = tracked(model, optimizer, STEPS[name])
    gathered = name != "optimizer"                              # the memory that is counted twice comes into sight with a gather
    twice = sum(p.to_local().nbytes for p in model.parameters()) if gathered else 0
    mine = book.peak_bytes(rank) - sum(row.bytes for row in earlier.allocations)
    return mine, seen["Total"] - twice, [(row.category, row.unit, row.bytes) for row in book.allocations]


@pytest.mark.parametrize("name", STEPS)
def test_other_steps_add_up_too(ranks, name):
    for mine, total, rows in ranks(2, beside_torch, name):
        assert abs(mine - total) < EXACT * total, (mine, total)
        if name != "optimizer":
            grads = {unit: sum(nbytes for category, other, nbytes in rows if (category, other) == (Category.UNSHARDED_GRAD, unit))
                     for _, unit, _ in rows if unit.startswith("blocks.")}
            assert set(grads.values()) == {BLOCK}, "whole gradients are named as such, once"
        if name.startswith("recomputed"):
            assert {unit for category, unit, _ in rows if category is Category.ACTIVATION} >= {f"blocks.{n}" for n in range(4)}
        if name == "optimizer":
            assert {unit for category, unit, _ in rows if category is Category.TEMPORARY} == {"optimizer"}
