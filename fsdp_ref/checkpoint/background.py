"""The thread that commits a checkpoint while training goes on: one at a time, with its own process group, its failure never lost.

    start    begins a save and returns its handle
    settle   waits for the save before, on every rank, and raises its failure if nobody has been told
    finish   waits for it on this rank alone (before loading, before the process group goes, at the end of the process)

Messages of two threads in one process group would come in a different order on different ranks and never meet; so the thread votes
over a second gloo group. It must never touch a tensor of the model, and never call a collective of the default group.

[Note: the end of the process] The thread is a daemon: Python does not wait for it without limit. A finalizer of `multiprocessing`
does, up to END_LIMIT, for it runs at the end of a main process and of a child alike (a child ends without calling `atexit`). Python
cannot change its exit code by then, so after a failure the process is left with `os._exit`, last of all finalizers.
"""

from __future__ import annotations

import multiprocessing.util
import os
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from .. import world
from ..errors import CheckpointError, FsdpRefError, RankError
from . import votes

END_LIMIT = 600.0        # seconds that the end of a process waits for its last save; a disk that hangs must not keep it for ever
LAST_OF_ALL = -100       # priority of the finalizer: after those of multiprocessing's own queues


class AsyncSave:
    """A checkpoint on its way to the disk.

    Attributes:
        step: number of finished steps it holds.
        stall: seconds for which `async_save` kept the caller.
    """

    def __init__(self, step: int, work: Callable[[], Path]) -> None:
        self.step, self.stall = step, 0.0
        self._path: Path | None = None
        self._error: Exception | None = None
        self._told = False
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"fsdp-ref-save-{step}", daemon=True)

    def _run(self, work: Callable[[], Path]) -> None:
        try:
            self._path = work()
        except FsdpRefError as error:
            self._error = error.with_traceback(None)
        except BaseException as error:
            self._error = CheckpointError(f"could not save step {self.step}: {type(error).__name__}: {error}")

    @property
    def done(self) -> bool:
        """True when the thread is through, well or not; `wait` then returns at once."""
        return not self._thread.is_alive()

    def wait(self, limit: float | None = None) -> Path:
        """The committed directory, when it is there. May be called again, and on some ranks only.

        Args:
            limit: seconds to wait at most; None: as long as the disk takes (the ranks wait for each other no longer than a collective
                may take).

        Raises:
            CheckpointError: the save failed, as `save` would have; or the limit is over and the save goes on.
            RankError: a rank died.
        """
        self._thread.join(limit)
        if not self.done:
            raise CheckpointError(f"step {self.step} is not saved after {limit:g} s; wait longer, or look whether the disk hangs")
        if failure := self._take_failure() or self._error:
            raise failure
        return self._path

    def _take_failure(self) -> Exception | None:
        """The failure, if nobody has been told of it; from now on somebody has."""
        untold = None if self._told else self._error
        self._told = True
        return untold


_last: AsyncSave | None = None                   # the newest save of this world, until the next one has looked at it
_unheard: list[AsyncSave] = []                   # saves that may have to speak at the end of the process
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
_finalized = 0                                   # the process that has the finalizer: a forked child does not inherit it


def group() -> dist.ProcessGroup | None:
    """The thread's process group, made at the first call, which is a collective; None in a world of one.

    Raises:
        RankError: a rank did not come.
    """
    if votes.world_size() == 1:
        return None
    everyone, here = dist.group.WORLD, world.current()
    if everyone not in _groups:
        limit = timedelta(seconds=here.timeout if here else world.TIMEOUT)
        try:
            _groups[everyone] = dist.new_group(backend="gloo", timeout=limit)
        except RuntimeError as error:
            raise world.explain_failure(error, "making the process group of async_save", -1) from error
    return _groups[everyone]


def start(step: int, work: Callable[[], Path]) -> AsyncSave:
    """Run `work` in a thread. `settle` comes before."""
    global _last, _finalized
    if _finalized != os.getpid():
        multiprocessing.util.Finalize(None, _at_the_end, exitpriority=LAST_OF_ALL)
        _finalized = os.getpid()
    _last = AsyncSave(step, work)
    _unheard[:] = [handle for handle in _unheard if handle._error and not handle._told] + [_last]
    _last._thread.start()
    return _last


def settle() -> None:
    """Wait for the save before; a collective when there was one.

    Raises:
        CheckpointError, RankError: it failed and nobody was told, here or on another rank; the same error on every rank.
    """
    global _last
    last, _last = _last, None
    if last is None:
        return
    last._thread.join()
    failure = last._take_failure()
    if isinstance(failure, RankError):                       # its group is of no use any more, so there is nobody to ask
        raise failure
    for told in votes.poll(lambda: str(failure or ""), group()):
        if told.value:
            raise CheckpointError(told.value)


def finish() -> None:
    """Wait on this rank for the save that runs. Raises nothing: a failure stays for whoever asks next."""
    if _last is not None:
        _last._thread.join(END_LIMIT)


def _leave_world() -> None:
    """Before the process group goes. What failed is told at the end of the process: in another world there is nobody to agree with."""
    global _last
    finish()
    _last = None


world.before_stop.append(_leave_world)


def _at_the_end() -> None:
    """[Note: the end of the process]"""
    code = 0
    for handle in _unheard:
        handle._thread.join(END_LIMIT)
        failure = handle._take_failure()
        if not handle.done:
            failure = CheckpointError(f"step {handle.step} is not saved, for its disk took longer than {END_LIMIT:g} s; older checkpoints "
                                      "are untouched")
        if failure is not None:
            print(f"fsdp-ref: {failure}", file=sys.stderr)
            code = getattr(failure, "exit_code", 1)
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
