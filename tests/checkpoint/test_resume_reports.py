"""Public bug reports about resuming, one test each (the numbers are those of the project's list): nothing is drawn, nothing is left at its
default, and the learning rate is that of the step, in whatever order things were built."""

import math

import numpy as np
import pytest
import torch

from fsdp_ref import checkpoint
from fsdp_ref.data import Corpus, Loader

from . import support
from .support import Toy, adamw, everything, random_states, train

TEXT = Corpus(np.frombuffer(b"".join(b"%06d " % i for i in range(40)), dtype=np.uint8), "numbers", 1)


def test_b15_saving_loading_and_what_is_built_afterwards_draw_nothing(tmp_path):
    """modelscope/ms-swift#9935, vllm-project/speculators#1027."""
    model, loader = Toy(), Loader(TEXT, context=8, batch=4)
    optimizer = adamw(model)
    train(model, optimizer, 1)
    before = random_states()
    checkpoint.save(tmp_path, step=1, model=model, optimizer=optimizer, loader=loader)
    assert random_states() == before
    checkpoint.async_save(tmp_path, step=2, model=model, optimizer=optimizer, loader=loader).wait()
    assert random_states() == before
    expected = support.draws()
    fresh = Toy(seed=1)
    checkpoint.load(tmp_path, model=fresh, optimizer=adamw(fresh), loader=loader)
    assert random_states() == before
    shuffled = Loader(TEXT, context=8, batch=4, seed=3, prefetch=2)              # built and used after the load
    for _ in range(10):
        shuffled.next()
    assert support.draws() == expected


@pytest.mark.parametrize("kind", ["AdamW", "fused AdamW", "SGD"])
def test_b18_an_optimizer_that_has_never_stepped_gets_everything(tmp_path, kind):
    """pytorch#126881, huggingface/transformers#23034: not the first loss shows it, but the first update."""
    make = {"AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
            "fused AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
            "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)}[kind]
    model = Toy()
    optimizer = make(model)
    train(model, optimizer, 3)
    checkpoint.save(tmp_path, step=3, model=model, optimizer=optimizer)
    other = Toy(seed=1)
    target = make(other)
    report = checkpoint.load(tmp_path, model=other, optimizer=target)
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    assert report.counts["optimizer"] == len(tensors) > 0
    assert everything(other, target) == everything(model, optimizer)
    states = torch.get_rng_state()
    losses = train(model, optimizer, 2, 3)
    torch.set_rng_state(states)
    assert train(other, target, 2, 3) == losses
    assert everything(other, target) == everything(model, optimizer)


def test_b20_a_parameter_that_never_had_a_gradient_has_no_state_and_may_get_one_later(tmp_path):
    """hiyouga/EasyR1#275."""
    def use_all(model, optimizer):
        train(model, optimizer, 1, 2)
        (model.unused.sum() * 2 + model.embed.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    model = Toy()
    optimizer = adamw(model)
    train(model, optimizer, 2)
    checkpoint.save(tmp_path, step=2, model=model, optimizer=optimizer)
    use_all(model, optimizer)
    other = Toy(seed=1)
    target = adamw(other)
    checkpoint.load(tmp_path, model=other, optimizer=target)
    assert other.unused not in target.state and other.first.weight in target.state
    use_all(other, target)
    assert everything(other, target) == everything(model, optimizer)


def warmup_then_cosine(step):
    """Three steps up, five along a cosine; step counts finished ones."""
    return (step + 1) / 3 if step < 3 else 0.5 * (1 + math.cos(math.pi * (step - 3) / 5))


def built(model, order):
    """Optimizer and schedule. The optimizer was built with a rate that must not survive."""
    optimizer = adamw(model, lr=0.01 if order == "as saved" else 99.0)
    if order == "a step was taken":
        train(model, optimizer, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_cosine)
    if order == "the schedule moved":
        optimizer.step()
        schedule.step()
    return optimizer, schedule


def rates(model, optimizer, schedule, first, last):
    """The learning rate of each group at each update."""
    used = []
    for step in range(first, last):
        used.append([group["lr"] for group in optimizer.param_groups])
        train(model, optimizer, 1, step)
        schedule.step()
    return used


@pytest.mark.parametrize("order", ["as saved", "another rate", "a step was taken", "the schedule moved"])
@pytest.mark.parametrize("stop", [1, 3, 5, 7, 8])            # first, end of warm-up, middle, last but one, last
def test_b21_every_update_has_the_rate_of_its_step(tmp_path, stop, order):
    """pytorch#60265, pytorch#29697, torchtitan#4168."""
    model = Toy()
    optimizer, schedule = built(model, "as saved")
    expected = rates(model, optimizer, schedule, 0, stop)
    checkpoint.save(tmp_path, step=stop, model=model, optimizer=optimizer, scheduler=schedule)
    expected += rates(model, optimizer, schedule, stop, 8)
    other = Toy(seed=1)
    target, theirs = built(other, order)
    checkpoint.load(tmp_path, model=other, optimizer=target, scheduler=theirs)
    assert rates(other, target, theirs, stop, 8) == expected[stop:]
    assert len(expected) == 8 and theirs.get_last_lr() == schedule.get_last_lr()
    assert everything(other, target) == everything(model, optimizer)
