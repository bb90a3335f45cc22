"""Five steps in one go and two plus three in a new process give the same bits: losses, state, and the next random draws of each rank."""

import random

import numpy as np
import pytest
import torch

from fsdp_ref import checkpoint, collectives

from . import support
from .support import Schedule, adamw, everything, sharded, train

pytestmark = pytest.mark.slow


def own_randomness(rank):
    """Each rank at another place in another stream."""
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    for _ in range(rank + 1):
        support.draws()


def start(rank, optimizer_of=adamw):
    model = sharded()
    optimizer = optimizer_of(model)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.3)


def steps(model, optimizer, schedule, count, first):
    losses = []
    for step in range(first, first + count):
        losses += train(model, optimizer, 1, step)
        schedule.step()
    return losses


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def amsgrad(model):
    return torch.optim.AdamW(list(model.named_parameters()), lr=torch.tensor(0.01), amsgrad=True, foreach=False)


OPTIMIZERS = {"adamw": adamw, "sgd": sgd, "amsgrad": amsgrad}


def resume(rank, size, root, kind, stop):
    own_randomness(rank)
    model, optimizer, schedule = start(rank, OPTIMIZERS[kind])
    straight = steps(model, optimizer, schedule, 5, 0)
    expected = (straight, everything(model, optimizer), schedule.state_dict(), support.draws())

    own_randomness(rank)
    model, optimizer, schedule = start(rank, OPTIMIZERS[kind])
    losses = steps(model, optimizer, schedule, stop, 0)
    checkpoint.save(root, step=stop, model=model, optimizer=optimizer, scheduler=schedule, loader=Schedule(epoch=0, index=stop), extra=stop)
    own_randomness(rank + 50)
    model, optimizer, schedule = start(rank, OPTIMIZERS[kind])
    loader = Schedule()
    report = checkpoint.load(root, model=model, optimizer=optimizer, scheduler=schedule, loader=loader, step=stop)
    assert (report.step, report.extra, report.random_state, report.skipped, report.refused) == (stop, stop, "exact", (), ())
    assert loader.state == {"epoch": 0, "index": stop}
    losses += steps(model, optimizer, schedule, 5 - stop, stop)
    return (losses, everything(model, optimizer), schedule.state_dict(), support.draws()) == expected, losses


CASES = ((1, "adamw", 2), (2, "adamw", 0), (2, "adamw", 2), (3, "adamw", 4), (2, "sgd", 2), (2, "amsgrad", 2))


@pytest.mark.parametrize(("size", "kind", "stop"), CASES)
def test_b14_b18_stopping_changes_nothing(ranks, tmp_path, size, kind, stop):
    results = ranks(size, resume, tmp_path, kind, stop)
    assert [same for same, _ in results] == [True] * size
    assert len({tuple(losses) for _, losses in results}) == size                    # dropout differs from rank to rank


def save_random(rank, size, root):
    own_randomness(rank)
    model = sharded()
    checkpoint.save(root, step=1, model=model)
    return support.draws()


def load_random(rank, size, root):
    model = sharded()
    report = checkpoint.load(root, model=model)
    first = support.draws()
    random.seed(0)
    checkpoint.load(root, model=model)
    return first, support.draws(), report.random_state


def test_b14_each_rank_gets_its_own_stream_back(ranks, tmp_path):
    expected = ranks(3, save_random, tmp_path)
    for rank, (first, again, kind) in enumerate(ranks(3, load_random, tmp_path)):
        assert first == again == expected[rank] and kind == "exact"


def test_another_world_size_derives_its_streams(ranks, tmp_path):
    """The same every time, another on each rank, and the report does not call it exact."""
    ranks(2, save_random, tmp_path)
    results = ranks(3, load_random, tmp_path)
    assert all(first == again and kind == "derived" for first, again, kind in results)
    assert len({str(first) for first, _, _ in results}) == 3


def recorded(rank, size, root):
    from fsdp_ref.ledger import record
    model = sharded()
    with record() as ledger:
        path = checkpoint.save(root, step=1, model=model)
        checkpoint.load(root, model=model)
    collectives.barrier()
    return [(event.name, event.unit, event.bytes, event.phase) for event in ledger.events if event.lane == "checkpoint"], \
        sum(file.stat().st_size for file in path.glob(f"model-{rank:05d}*"))


def test_the_ledger_sees_the_bytes(ranks, tmp_path):
    for rank, (events, size) in enumerate(ranks(2, recorded, tmp_path)):
        own = f"model-{rank:05d}-of-00002.safetensors"
        nbytes = {name: count for name, unit, count, _ in events if unit == own}
        assert 0 < nbytes["write"] < size and nbytes["read"] == nbytes["write"]      # the same world size reads what it wrote
        assert {phase for *_, phase in events} == {"checkpoint"}
        assert "verify" in {name for name, *_ in events}
