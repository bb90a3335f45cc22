"""Stopping when a machine is about to be taken away: a signal to any one rank becomes a decision of all ranks.

    with preemption.watch() as stop:
        for step in range(first, last):
            train_one_step()
            if stop.agreed():                              # the same answer on every rank
                checkpoint.save(root, step=step + 1, model=model, optimizer=optimizer, loader=loader)
                sys.exit(preemption.EXIT_CODE)

Spot instances, Slurm, Kubernetes and torchrun announce the end with SIGTERM (Slurm also with SIGUSR1, `--signal=USR1@60`), to one machine
or all, and kill some seconds later. This module must never do anything inside a signal handler but set a flag, and never import torch
before a collective is asked for, so that a rank can listen from its first moment on.

[Note: why the handler only sets a flag] A handler runs between any two instructions: inside a half-done step, an optimizer update, a
save. A collective made there would meet another collective on the other ranks, and all would wait. One rank that stops alone makes the
others wait as well. So the flag waits for the end of the step, where every rank adds its own (rank 0 [0] + rank 1 [1] + rank 2 [0] ->
all [1]) and all see the same sum in the same step. A second signal sets the flag that is set.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

EXIT_CODE = os.EX_TEMPFAIL                                  # 75: nothing is wrong, try again later (sysexits.h)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Stop:
    """Whether this rank has been asked to stop, and whether any rank has."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None           # the first that came to this rank

    @property
    def requested(self) -> bool:
        """This rank was asked. For adding to a sum that is exchanged anyway; acting on it alone would leave the other ranks waiting."""
        return self.signal is not None

    def agreed(self, group: ProcessGroup | None = None) -> bool:
        """Whether any rank was asked: a collective, with the same answer on every rank. Costs an all-reduce of one number.

        Raises:
            RankError: a rank died or never came.
        """
        import torch
        import torch.distributed as dist

        from . import collectives
        if not dist.is_initialized():
            return self.requested
        group = group or dist.group.WORLD
        asked = torch.tensor([float(self.requested)], device=collectives.control_device(group))
        collectives.all_reduce(asked, group, collectives.Label("stop", "control"), op=dist.ReduceOp.SUM).wait()
        return bool(asked.item())

    def _hear(self, number: int, _frame: object) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number)


@contextlib.contextmanager
def watch(signals: tuple[signal.Signals, ...] = SIGNALS) -> Iterator[Stop]:
    """Listen for `signals` instead of dying of them, until the block is left; then they mean again what they meant before.

    A signal that a library handles outside Python (faulthandler's, by which the notebook's ranks tell where they are) stays with it: Python
    could take it over, and not give it back.

    Raises:
        ConfigError: not the main thread, the only one that Python lets handle signals.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("preemption.watch() was called in a thread and Python handles signals in the main thread only; enter it there "
                          "and give the thread what it returns")
    stop = Stop()
    signals = tuple(number for number in signals if not _taken_outside_python(number))
    before = {number: signal.signal(number, stop._hear) for number in signals}
    for number in signals:
        signal.siginterrupt(number, False)                  # a library's system calls go on as if nothing had happened
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _taken_outside_python(number: signal.Signals) -> bool:
    """Whether the system calls a handler that Python does not know. Linux says which are caught (SigCgt, proc(5)); elsewhere: no."""
    if signal.getsignal(number) is not signal.SIG_DFL:
        return False
    try:
        caught = next(line for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines() if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
