"""Stopped after any step and resumed, a run has the bits of one that never stopped: losses, weights, moments, learning rates, order of the
text and the next random draws; on another number of ranks the same state, the same text, and the same numbers within rounding."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fsdp_ref import checkpoint, collectives, data_parallel, train_loop, world
from fsdp_ref.data import Corpus, Loader
from fsdp_ref.models import GPT, GPTConfig
from fsdp_ref.placements import ZERO3
from fsdp_ref.train_options import learning_rate
from fsdp_ref.train_step import weight_decay_groups

from ..checkpoint.support import draws, everything
from .test_loop import SMALL

pytestmark = pytest.mark.slow

FIRST_SEED = 7
STEPS, WINDOWS = 6, 24       # two steps of 12 windows are an epoch: stops come inside epochs and at their ends
TEXT = Corpus(np.frombuffer(b"".join(b"%06d " % i for i in range(30)), dtype=np.uint8), "numbers", 1)
RUN = replace(SMALL, steps=STEPS, dropout=0.25, accumulate=2, prefetch=2, warmup=2, keep_last=0, save_every=0)


def build(size, out, seed=99, **more):
    """A trainer. Python's and numpy's generators are not the trainer's to seed: they stand somewhere else at every start."""
    random.seed(seed)
    np.random.seed(seed)
    return train_loop.Trainer(replace(RUN, ranks=size, **more), world.current(), TEXT, out)


def outcome(trainer, rows):
    told = [[row["loss_hex"], row["lr"], row["gradient_norm"], row["epoch"]] for row in rows]
    return told, everything(trainer.model, trainer.optimizer), draws()


def in_one_go(size, out, strategy, save=False):
    """The run that never stops, and (save=True) a checkpoint of every step on the way."""
    trainer, rows = build(size, out, FIRST_SEED, strategy=strategy), []
    for _ in range(STEPS):
        rows.append(trainer.train_step())
        if save:
            trainer.saver.save()
    return outcome(trainer, rows)


def resumed_at_every_step(size, out, strategy):
    """As many starts as steps: each resumes, saves at once what it has read, trains one step and saves that."""
    rows = []
    for step in range(STEPS):
        trainer = build(size, out, FIRST_SEED + step, strategy=strategy)
        if step:
            trainer.resume(out / "checkpoints")
            checkpoint.save(out / "again", step=step, model=trainer.model, optimizer=trainer.optimizer, loader=trainer.loader)
            trainer = build(size, out, strategy=strategy)
            trainer.resume(out / "again")                    # stopped immediately after a resume
            trainer.saver.newest = None
        rows.append(trainer.train_step())
        trainer.saver.save()
    return outcome(trainer, rows)


def stopped_once(size, out, strategy, step):
    trainer = build(size, out, strategy=strategy)
    trainer.resume(out / "checkpoints" / f"step-{step:08d}")
    return outcome(trainer, [trainer.train_step() for _ in range(step, STEPS)])


def strategies(rank, size, home, names):
    """What differs from the run that was never stopped; nothing."""
    wrong = []
    for name in names:
        expected = in_one_go(size, home / "straight", name)
        assert expected[0][1][3] == 1                        # the second step ends an epoch
        if in_one_go(size, home / name, name, save=True) != expected:
            wrong.append((name, "saving changes something"))
        for step in range(1, STEPS) if name == "zero3" else (3,):
            rows, *state = stopped_once(size, home / name, name, step)
            if (expected[0][:step] + rows, *state) != expected:
                wrong.append((name, step))
        if resumed_at_every_step(size, home / f"{name}-often", name) != expected:
            wrong.append((name, "resumed at every step"))
    return wrong, expected[0][0][0]


@pytest.mark.parametrize(("size", "names"), [(2, ("zero3", "zero2", "zero1", "ddp", "hsdp")), (3, ("zero3",))])
def test_b14_b21_a_stop_after_any_step_changes_no_bit(ranks, tmp_path, size, names):
    results = ranks(size, strategies, tmp_path, names, limit=240)
    assert [wrong for wrong, _ in results] == [[]] * size
    assert len({loss for _, loss in results}) == 1


def test_b21_the_learning_rate_is_a_function_of_the_step_alone():
    options = replace(RUN, steps=8, warmup=3)
    asked_in_order = [learning_rate(step, options) for step in range(1, 9)]
    for step in (8, 3, 1, 5):                                # last, end of warm-up, first, middle: in any order
        assert learning_rate(step, options) == asked_in_order[step - 1]


def accumulated(rank, size, counts):
    """Losses and gradient norms with so many micro-batches each."""
    found = []
    for count in counts:
        trainer = build(size, Path("unused"), accumulate=count, dropout=0.0)
        found.append([(row["loss"], row["gradient_norm"]) for row in (trainer.train_step() for _ in range(4))])
    return found


def test_micro_batches_are_the_same_step(ranks):
    whole, *cut = ranks(2, accumulated, (1, 2, 3, 6))[0]
    for found in cut:
        assert np.array(found) == pytest.approx(np.array(whole), rel=1e-4)


# -- another number of ranks ----------------------------------------------------------------------------------------------------------


SIZES, STOP = (1, 2, 3, 4), 3


def in_float64(rank, size):
    torch.manual_seed(1)
    model = data_parallel(GPT(GPTConfig(context=8, dim=12, layers=1, heads=2)).double(), ZERO3)
    optimizer = torch.optim.AdamW(weight_decay_groups(model), lr=0.01)
    return model, optimizer, Loader(TEXT, context=8, batch=12, rank=rank, ranks=size, prefetch=1)


def go_on(model, optimizer, loader, steps):
    """The bytes of each global batch, then the weights' norm and sum a parameter (moments show in them)."""
    order = []
    for _ in range(steps):
        inputs, targets = (torch.from_numpy(part) for part in loader.next())
        order.append([row for rows in collectives.gather_json(inputs.tolist()) for row in rows])
        model.loss(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return order, {name: p.full_tensor().detach().flatten().tolist() for name, p in model.named_parameters()}


def save_there(rank, size, home):
    """The state that was saved, and what the run that just goes on does in three more steps."""
    model, optimizer, loader = in_float64(rank, size)
    go_on(model, optimizer, loader, STOP)
    checkpoint.save(home / str(size), step=STOP, model=model, optimizer=optimizer, loader=loader)
    return everything(model, optimizer), *go_on(model, optimizer, loader, 3)


def load_here(rank, size, home):
    """For every saved world size: state as loaded, then order and weights after three steps more."""
    found = {}
    for saved in SIZES:
        model, optimizer, loader = in_float64(rank, size)
        report = checkpoint.load(home / str(saved), model=model, optimizer=optimizer, loader=loader)
        assert report.random_state == ("exact" if saved == size else "derived")
        found[saved] = everything(model, optimizer), *go_on(model, optimizer, loader, 3)
    return found


def test_b23_any_world_size_goes_on_from_any_other(ranks, tmp_path):
    saved = {size: ranks(size, save_there, tmp_path)[0] for size in SIZES}
    loaded = {size: ranks(size, load_here, tmp_path)[0] for size in SIZES}
    _, order, expected = saved[1]                            # one process, the whole batch, never stopped
    windows = [tuple(row) for batch in order for row in batch]
    assert len(windows) == 36 and len(set(windows)) == WINDOWS
    for size in SIZES:
        for origin in SIZES:
            state, seen, weights = loaded[size][origin]
            assert state == saved[origin][0] and seen == order, (origin, size)
            for name, values in expected.items():
                assert np.abs(np.array(weights[name]) - np.array(values)).max() < 1e-12, (origin, size, name)
