"""Where ranks meet before they can talk: a file, or the store that torchrun brings.

world.py is the only caller. This module must never make a collective, and never wait without a limit.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from .errors import Preempted, WorldError
from .words import first_line, name_ranks

ARRIVAL = 60.0          # seconds that ranks under torchrun wait for the slowest to start


class _Patience:
    """How long to wait for the others."""

    def __init__(self, seconds: float, give_up: Callable[[], bool]) -> None:
        self.seconds, self.give_up, self.deadline = seconds, give_up, time.monotonic() + seconds

    def wait_for(self, waiting: set[int]) -> None:
        """Wait a little; `waiting` are the ranks that have not come."""
        if self.give_up():
            raise Preempted("a signal asked the run to stop before its ranks had met; nothing is lost, start it again as before")
        if time.monotonic() > self.deadline:
            raise WorldError(f"{name_ranks(waiting)} did not arrive within {self.seconds:g} s; look at the output of "
                             f"{'that rank' if len(waiting) == 1 else 'those ranks'} first")
        time.sleep(0.02)


def meet(rank: int, size: int, path: str | os.PathLike | None, under_torchrun: bool, timeout: float,
         give_up: Callable[[], bool]) -> tuple[dist.Store, dist.Store, int]:
    """Open the store and wait until every rank has written its name there; returns `World`'s `job`, `store` and `restarts`.

    `path`: the file to meet in; None: torchrun's store, or nobody else. Under torchrun the wait lasts `ARRIVAL` seconds at least: machines
    do not import torch equally fast, however short a collective may take. `give_up`: whether to wait no longer, asked again and again.

    Raises:
        WorldError: the store cannot be reached, or a rank did not come in time; the message names it.
        Preempted: `give_up` said so.
    """
    limit, patience = timedelta(seconds=timeout), max(timeout, ARRIVAL) if under_torchrun else timeout
    clock = _Patience(patience, give_up)
    if path is not None:
        store: dist.Store = dist.FileStore(str(Path(path)), size)
    elif under_torchrun:
        try:
            store, _, _ = next(iter(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=patience))))
        except Exception as error:
            raise WorldError(f"rank {rank} cannot reach the store at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} "
                             f"({first_line(error)}); did all {size} ranks start, and is the port free? "
                             "torchrun --standalone picks one") from error
    elif size == 1:
        store = dist.HashStore()
    else:
        raise WorldError(f"{size} ranks need a place to meet; give store=PATH or start them with torchrun")
    store.set_timeout(limit)
    job, restarts, answer = store, 0, None
    if under_torchrun:
        store = dist.PrefixStore("fsdp_ref", job)
        name, restarts, answer = _session(store, rank, clock)
        store = dist.PrefixStore(name, store)
    store.set(f"rank/{rank}", json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
    waiting = set(range(size))
    while waiting:
        waiting = {other for other in waiting if not store.check([f"rank/{other}"])}
        if answer is not None:
            answer(waiting)
        if waiting:
            clock.wait_for(waiting)
    return job, store, restarts


def _session(store: dist.Store, rank: int, clock: _Patience) -> tuple[str, int, Callable[[set[int]], None] | None]:
    """A name that only the ranks of this start know, how often there was a start before, and (rank 0) how to tell the others.

    [Note: restarts share a store] torchrun keeps one store through all restarts, and each machine counts restarts by itself
    (TORCHELASTIC_RESTART_COUNT may be 1 here and 0 there), so neither tells this start's entries from those of ranks that died. So rank 0
    makes a name up, and every other rank asks for it with a question of its own: an answer to a dead rank's question fits nobody.
    """
    if rank == 0:
        name, restarts = uuid.uuid4().hex, store.add("starts", 1) - 1

        def answer(waiting: set[int]) -> None:
            for other in waiting:
                if store.check([f"question/{other}"]):
                    store.set(f"answer/{other}", f"{store.get(f'question/{other}').decode()} {name} {restarts}")

        return name, restarts, answer
    question = uuid.uuid4().hex
    store.set(f"question/{rank}", question)
    while True:
        if store.check([f"answer/{rank}"]):
            asked, name, restarts = store.get(f"answer/{rank}").decode().split()
            if asked == question:
                return name, int(restarts), None
        clock.wait_for({0})
