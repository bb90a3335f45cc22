"""Where is a rank? A thread in every rank answers when another one asks.

A rank that never comes to a collective is somewhere else: in an endless loop, at another branch, asleep. Its main thread cannot say so,
but a second thread can look at it. Questions and answers go through the store in which the ranks met. This module must never touch the
process group, and never keep a process alive.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import asdict

import torch.distributed as dist

from .source import Place, places_of

POLL = 0.25             # seconds between two looks at the store
PATIENCE = 1.5          # seconds an answer may take


class Witness:
    """The thread of one rank. `store` is its own connection, so that a main thread which waits in the store does not block it."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._main, self._ended = threading.main_thread().ident, threading.Event()
        threading.Thread(target=self._watch, name="fsdp-ref-witness", daemon=True).start()

    def stop(self) -> None:
        """Answer no more."""
        self._ended.set()

    def _watch(self) -> None:
        try:
            while not self._ended.wait(POLL):
                if self._store.check([f"where?/{self._rank}"]):
                    places = places_of(sys._current_frames().get(self._main))
                    self._store.set(f"where/{self._rank}", json.dumps([asdict(place) for place in places]))
                    return
        except Exception:                                   # the store went with the rank that held it: nobody can ask any more
            return


def ask(store: dist.Store, ranks: set[int]) -> dict[int, list[Place]]:
    """Where these ranks are in their program, innermost line first, as far as they answer within `PATIENCE` seconds."""
    for rank in ranks:
        store.set(f"where?/{rank}", "")
    deadline, found = time.monotonic() + PATIENCE, {}
    while len(found) < len(ranks) and time.monotonic() < deadline:
        for rank in ranks - found.keys():
            if store.check([f"where/{rank}"]):
                found[rank] = [Place(**each) for each in json.loads(store.get(f"where/{rank}"))]
        time.sleep(0.05)
    return found
