"""A signal to one rank of three, at every kind of moment: all ranks save the same step and leave, and the run that goes on has the bits and
the log of one that nobody stopped (B31 of the bug reports)."""

import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

from fsdp_ref import collectives, interval, preemption, train_loop, train_run, world
from fsdp_ref.checkpoint import files
from fsdp_ref.errors import ConfigError, Preempted
from fsdp_ref.train_saving import Saver

from ..checkpoint.support import everything
from .test_loop import SMALL, TEXT

STEPS = 6
RUN = replace(SMALL, ranks=3, steps=STEPS, dropout=0.25, eval_every=3, save_every=2, keep_last=0, accumulate=2, prefetch=1, log_every=100)


# -- the library piece ------------------------------------------------------------------------------------------------------------


def test_the_handler_sets_a_flag_and_the_old_meaning_comes_back():
    before = signal.getsignal(signal.SIGTERM)
    with preemption.watch() as stop:
        assert not stop.requested and not stop.agreed()
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(number)
        assert stop.requested and stop.agreed() and stop.signal == signal.SIGUSR1
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler            # Ctrl-C keeps its meaning
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which signals are caught")
def test_a_signal_that_a_library_handles_stays_with_it():
    """The notebook's ranks write their stack when SIGUSR1 comes; without that handler it would end them."""
    code = ("import faulthandler, os, signal, sys\nfrom fsdp_ref import preemption\n"
            "faulthandler.register(signal.SIGUSR1, file=sys.stderr)\n"
            "with preemption.watch() as stop:\n    os.kill(os.getpid(), signal.SIGUSR1)\n    assert not stop.requested\n"
            "    os.kill(os.getpid(), signal.SIGTERM)\n    assert stop.requested\n"
            "os.kill(os.getpid(), signal.SIGUSR1)\nprint('alive')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "alive\n" and done.stderr.count("most recent call first") == 2, done.stderr


def test_a_thread_is_told_where_to_listen():
    told = []

    def work():
        with pytest.raises(ConfigError, match="main thread"), preemption.watch():
            pass
        told.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert told == [True]


def test_listening_begins_before_torch_is_there():
    code = "import sys\nfrom fsdp_ref import preemption\nwith preemption.watch():\n    assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def own_loop(rank, size):
    """The loop of preemption.py's docstring; rank 1 alone hears a signal, in its third step."""
    with preemption.watch() as stop:
        for step in range(1, 10):
            if rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            if stop.agreed():
                return step, stop.requested


@pytest.mark.slow
def test_one_rank_hears_it_and_all_agree_in_the_same_step(ranks):
    assert ranks(3, own_loop) == [(3, False), (3, True), (3, False)]


# -- every moment -----------------------------------------------------------------------------------------------------------------


class Layer(files.Files):
    """A disk that sends this process a signal at its first write, and another one at its first rename or directory flush."""

    def __init__(self, signals):
        self.signals = list(signals)

    def ring(self):
        if self.signals:
            os.kill(os.getpid(), self.signals.pop())

    def write_some(self, descriptor, content):
        self.ring()
        return super().write_some(descriptor, content)

    def fsync_dir(self, path):
        self.ring()
        super().fsync_dir(path)


def ring_once(monkeypatch, holder, name, when):
    """Send this process SIGTERM in the call of `holder.name` for which `when()` is true, the first time."""
    original, rung = getattr(holder, name), []

    def ringing(*args, **kwargs):
        if not rung and when():
            rung.append(True)
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    monkeypatch.setattr(holder, name, ringing)


def ring_in_backward(output, when):
    """Once more, in the thread that runs backward."""
    if output.requires_grad and when():
        output.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGUSR1))


def arm(monkeypatch, moment, trainer):
    """The victim's signal. Steps count from 1; `trainer.step` counts finished ones."""
    at = lambda step: lambda: trainer.step == step - 1  # noqa: E731
    block = trainer.model.blocks[0]
    if moment == "start":
        os.kill(os.getpid(), signal.SIGTERM)
    elif moment == "batch":
        ring_once(monkeypatch, trainer.loader, "next", at(1))
    elif moment == "forward":
        ring_once(monkeypatch, type(block.attn), "forward", at(3))
    elif moment == "between micro-batches":
        ring_once(monkeypatch, type(trainer.model), "set_is_last_backward", at(4))
    elif moment == "backward":
        ring_once(monkeypatch, torch.Tensor, "backward", at(4))
        block.mlp.register_forward_hook(lambda module, inputs, output: ring_in_backward(output, at(4)))
    elif moment == "optimizer":
        ring_once(monkeypatch, trainer.optimizer, "step", at(5))
    elif moment == "all-reduce of the loss":                 # too late for the message of its own step
        ring_once(monkeypatch, collectives, "all_reduce", at(2))
    elif moment == "evaluation":
        ring_once(monkeypatch, torch.nn.functional, "cross_entropy", lambda: not trainer.model.training and trainer.step == 3)
    elif moment == "last evaluation":
        ring_once(monkeypatch, torch.nn.functional, "cross_entropy", lambda: not trainer.model.training and trainer.step == STEPS)
    elif moment == "log":
        ring_once(monkeypatch, trainer.saver, "due", at(2))
    elif moment in ("save", "background save"):
        monkeypatch.setattr(files, "_layer", Layer([signal.SIGUSR1]))
    elif moment == "save, twice":
        monkeypatch.setattr(files, "_layer", Layer([signal.SIGTERM, signal.SIGTERM]))
    elif moment == "step during a background save":
        ring_once(monkeypatch, trainer.loader, "next", at(3))


# moment -> the step that is saved: the one under way; none more after a save or an evaluation (None: whatever the thread was overtaken by)
MOMENTS = {"start": 0, "batch": 1, "forward": 3, "between micro-batches": 4, "backward": 4, "optimizer": 5, "all-reduce of the loss": 2,
           "evaluation": 3, "last evaluation": 6, "log": 2, "save": 2, "save, twice": 2,
           "background save": None, "step during a background save": 3}


def one_start(out, stop, resume=None, options=RUN, prepare=None):
    """What `train_loop.train` does between joining and leaving the world; the trainer, with its folder closed."""
    start = train_loop.together(lambda: train_run.begin(str(out), resume))
    trainer = train_loop.Trainer(options, world.current(), TEXT, out, stop)
    if start.source is not None:
        trainer.resume(start.source)
    trainer.open_run()
    if prepare:
        prepare(trainer)
    try:
        trainer.run()
    finally:
        trainer.close()
    return trainer


def committed(out):
    return [int(path.name.removeprefix("step-")) for path in train_run.checkpoints(out)]


def exact(out):
    """The log without the times that the steps took."""
    rows = train_run.read_log(out)
    return [{key: value for key, value in row.items() if key not in ("tokens_per_second", "save_seconds")} for row in rows]


def stopped_at_every_moment(rank, size, home):
    """For each moment: what was told, which steps are committed, and whether the run that goes on is the uninterrupted one."""
    straight = one_start(home / "straight", None)
    expected = everything(straight.model, straight.optimizer)
    found = {}
    for number, moment in enumerate(MOMENTS):
        out, victim, options = home / moment.replace(" ", "-"), number % size, replace(RUN, async_save="background" in moment)
        with preemption.watch() as stop, pytest.MonkeyPatch.context() as monkeypatch:
            try:
                one_start(out, stop, options=options, prepare=lambda trainer: rank == victim and arm(monkeypatch, moment, trainer))     # noqa: B023
                message = ""
            except Preempted as error:
                message = str(error)
        collectives.barrier()
        at, leftovers = committed(out), [path.name for path in (out / "checkpoints").iterdir() if ".tmp-" in path.name]
        collectives.barrier()
        again = one_start(out, None, "auto", options)
        same = everything(again.model, again.optimizer) == expected
        found[moment] = (message, stop.requested == (rank == victim), at, leftovers, same)
    return found


@pytest.mark.slow
def test_b31_a_signal_at_any_moment_saves_one_step_and_the_run_goes_on_bit_for_bit(ranks, tmp_path):
    results = ranks(3, stopped_at_every_moment, tmp_path, limit=240)
    for moment, step in MOMENTS.items():
        every = [2, 4, 6]
        step = step or int(re.search(r"step (\d)", results[0][moment][0])[1])
        saved = [other for other in every if other < step] + [step]
        for found in results:
            message, victim_alone, at, leftovers, same = found[moment]
            assert f"step {step} is saved" in message and "--resume auto" in message, (moment, message)
            assert (victim_alone, at, leftovers, same) == (True, saved, [], True), moment
        assert exact(tmp_path / moment.replace(" ", "-")) == exact(tmp_path / "straight"), moment
    assert len(exact(tmp_path / "straight")) == STEPS


# -- what saves cost --------------------------------------------------------------------------------------------------------------


def saving_automatically(rank, size, home):
    """A run with --save-every auto whose stalls and steps last what the test says; each rank has measured something else."""
    options = replace(SMALL, ranks=size, steps=40, save_every="auto", mtbf=20.0, keep_last=0, eval_every=0, log_every=100)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Saver, "mean_stall", lambda self: 0.4 if rank else 0.1)
        monkeypatch.setattr(Saver, "step_seconds", lambda self: 0.5 if rank else 0.25)
        trainer = one_start(home / "run", None, options=options)
    return trainer.saver.every, len(trainer.saver.stalls), trainer.saver.summary()


@pytest.mark.slow
def test_automatic_saving_follows_the_slowest_rank_on_all(ranks, tmp_path):
    results = ranks(2, saving_automatically, tmp_path)
    best = interval.advise(stall=0.4, step=0.5, mtbf=20.0).steps
    assert best == 7 and [every for every, *_ in results] == [best] * 2
    assert committed(tmp_path / "run") == [5, 12, 19, 26, 33, 40]
    rows = train_run.read_log(tmp_path / "run")
    assert [row["step"] for row in rows if "save_seconds" in row] == [6, 13, 20, 27, 34]      # the line after each save, but the last
    for _, count, (cost, advice) in results:
        assert count == 6 and "saved 6 times: training stood still for " in cost and " % of the time" in cost
        assert "with a failure every 20 s, saving every " in advice and "wastes least" in advice and "a failure costs about " in advice
