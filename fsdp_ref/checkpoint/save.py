"""Save a checkpoint, and wait for it or not: `save` returns when it is committed, `async_save` when its state has been copied.

Both take a snapshot (snapshot.py) and commit it (commit.py); `async_save` does the second in a thread (background.py). Saving draws
no random number and changes nothing in memory.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import torch

from .. import ledger
from ..ledger import Lane
from . import background
from .background import AsyncSave
from .commit import Commit
from .snapshot import Snapshot, Staging

_stagings: weakref.WeakKeyDictionary[torch.nn.Module, Staging] = weakref.WeakKeyDictionary()


def save(root: str | os.PathLike, *, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None,
         scheduler: object | None = None, loader: object | None = None, extra: object = None, keep_last: int | None = None) -> Path:
    """Write the state of a training run to `root/step-<step>`; a collective of all ranks. Returns the directory.

    Args:
        root: directory that all ranks share; made if missing.
        step: number of finished steps; names the checkpoint.
        model: parameters (DTensor or plain) and persistent buffers are saved.
        optimizer: any torch optimizer over the model's parameters.
        scheduler, loader: objects with `state_dict()`, the same on every rank; numbers, text, lists, tables.
        extra: more of the same kind.
        keep_last: afterwards delete all but so many committed checkpoints (1 or more); None deletes nothing.

    An `async_save` that is still running is waited for first; if it failed and nobody was told, its error is raised here and
    nothing is saved.

    Raises:
        CheckpointError: on every rank, with the same message naming rank and cause; older checkpoints are untouched.
        RankError: a rank died or did not come; older checkpoints are untouched.
    """
    background.settle()
    return Commit(Path(root), step).run(lambda: Snapshot.take(step, keep_last, model, optimizer, scheduler, loader, extra))


def async_save(root: str | os.PathLike, *, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None,
               scheduler: object | None = None, loader: object | None = None, extra: object = None,
               keep_last: int | None = None) -> AsyncSave:
    """As `save`, but returns as soon as the state has been copied; writing, voting and committing go on in a thread.

    Everything is copied before this returns: tensors on any device, counters, tables, groups, random state. Whatever training does
    next cannot change what is saved. The copy takes as much memory as this rank's state (pinned where that is on a GPU); it is kept
    and used again by the next `async_save` of the same model, and freed with the model.

    Only one save runs at a time: this waits for the one before, and so do `save` and `load`. An error in the thread is raised by
    `wait()`; if that was not called, by the next `save` or `async_save`, on every rank and once; if there is none, it is printed when
    the process ends, which then exits with the error's code. A process that ends in the regular way or by an exception, or calls
    `world.stop()`, finishes the save first; one that is killed leaves nothing but a temporary directory, which the next save removes.

    Returns:
        A handle: `wait()` returns the directory, `done` tells whether the thread is through, `stall` how many seconds this call took.

    Raises:
        CheckpointError: only what the save before failed with. What is wrong with this one is raised by `wait()`.
        RankError: a rank did not come to the first call, in which the ranks make a process group for the thread.
    """
    began = ledger.now()
    background.settle()
    commit = Commit(Path(root), step, background.group())
    staging = _stagings.setdefault(model, Staging())
    problem: Exception | None = None
    snapshot: Snapshot | None = None
    try:
        snapshot = Snapshot.take(step, keep_last, model, optimizer, scheduler, loader, extra, staging.hold)
    except Exception as error:                               # the other ranks' threads must hear of it, so it travels with the first vote
        problem = error.with_traceback(None)

    def taken() -> Snapshot:
        if problem is not None:
            raise problem
        return snapshot

    handle = background.start(step, lambda: commit.run(taken))
    handle.stall = ledger.now() - began
    ledger.add_event(Lane.CHECKPOINT, "stage", f"step {step}", "checkpoint", began, began + handle.stall, staging.bytes)
    return handle
