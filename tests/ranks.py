"""Ranks for tests: four processes that live as long as the test session, one process group a call.

    def work(rank, world, x): ...          # a function at the top level of a test module
    results = ranks(3, work, 7)             # [work(0, 3, 7), work(1, 3, 7), work(2, 3, 7)], each on its own rank

A rank that raises fails the call with that rank's exception; a rank that hangs or dies is killed and the processes are replaced.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import uuid
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path

# On Linux torch is imported once, by a fork server that computes nothing; elsewhere once a rank.
_METHOD = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
_METHOD.set_forkserver_preload(["torch.distributed.fsdp", "fsdp_ref.engine"])


def _prepare(parent: int) -> None:
    import torch

    from fsdp_ref import world
    world.die_with_parent(parent)
    torch.set_num_threads(1)


def _call(rank, size, store, timeout, device, fn, args, kwargs):
    from fsdp_ref import collectives, ledger, world
    collectives.reset_sequence()
    world.start(rank, size, store=store, timeout=timeout, device=device)
    try:
        with ledger.afresh():                               # what another test left alive is not this one's
            return fn(rank, size, *args, **kwargs)
    finally:
        world.stop()


class RankPool:
    """One single-process executor a rank, so that rank r is always the same process."""

    def __init__(self, size: int = 4) -> None:
        self._size = size
        self._executors: list[ProcessPoolExecutor] = []
        self._pids: list[int] = []
        self._home = tempfile.TemporaryDirectory(prefix="fsdp-ref-tests-")

    def __call__(self, size: int, fn, *args, limit: float = 60.0, timeout: float = 20.0, device: str = "cpu", **kwargs) -> list:
        """Run `fn(rank, size, *args, **kwargs)` on `size` ranks. `limit`: seconds for the call; `timeout`: for one collective."""
        self._grow(size)
        store = Path(self._home.name) / uuid.uuid4().hex
        futures = [self._executors[r].submit(_call, r, size, str(store), timeout, device, fn, args, kwargs) for r in range(size)]
        _, late = wait(futures, timeout=limit)
        if late:
            self.close()
            raise TimeoutError(f"ranks {[r for r, f in enumerate(futures) if f in late]} did not finish {fn.__name__} in {limit} s")
        errors = [(r, f.exception()) for r, f in enumerate(futures) if f.exception() is not None]
        if errors:
            if any(type(error).__name__ == "BrokenProcessPool" for _, error in errors):
                self.close()
            errors.sort(key=lambda pair: type(pair[1]).__name__ == "RankError")       # follow-on errors after the cause
            rank, error = errors[0]
            error.add_note(f"raised on rank {rank} of {size}")
            raise error
        return [future.result() for future in futures]

    def _grow(self, size: int) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        while len(self._executors) < size:
            executor = ProcessPoolExecutor(1, mp_context=_METHOD, initializer=_prepare, initargs=(os.getpid(),))
            self._executors.append(executor)
        fresh = [executor.submit(os.getpid) for executor in self._executors[len(self._pids):]]
        self._pids += [future.result(timeout=60) for future in fresh]

    def close(self) -> None:
        """Kill the processes; the next call starts new ones."""
        for pid in self._pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for executor in self._executors:
            executor.shutdown(wait=False, cancel_futures=True)
        self._executors, self._pids = [], []
