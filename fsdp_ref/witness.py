"""Where is a rank? The line it is at, in words; and a thread in every rank that answers when another one asks.

A rank that never comes to a collective is somewhere else: in an endless loop, at another branch, asleep. Its main thread cannot say so,
but a second thread can look at it. Questions and answers go through the store in which the ranks met. This module must never touch the
process group, and never keep a process alive.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

POLL = 0.25             # seconds between two looks at the store
PATIENCE = 1.5          # seconds an answer may take
_LIBRARIES = tuple(str(Path(path).resolve()) + "/" for path in {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"),
                                                                sysconfig.get_path("platlib"), str(Path(torch.__file__).parents[1])})
_OWN = str(Path(__file__).resolve().parent) + "/"


def place_of(frame: FrameType | None) -> str:
    """The innermost line of `frame`'s stack that is neither ours nor a library's: `line 14 of train.py, in step`; else an empty text.

    In a notebook's cell it is `line 3 of the cell`.
    """
    for each in _outwards(frame):
        name = each.f_code.co_filename
        in_cell = "ipykernel" in name and "site-packages" not in name or name.startswith("<ipython-input")
        if in_cell or not (name.startswith(_LIBRARIES) or name.startswith(_OWN) or name.startswith("<")):
            where = "the cell" if in_cell else Path(name).name
            inside = "" if each.f_code.co_name == "<module>" else f", in {each.f_code.co_name}"
            return f"line {each.f_lineno} of {where}{inside}"
    return ""


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


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
                    self._store.set(f"where/{self._rank}", place_of(sys._current_frames().get(self._main)) or "in a library")
                    return
        except Exception:                                   # the store went with the rank that held it: nobody can ask any more
            return


def ask(store: dist.Store, ranks: set[int]) -> dict[int, str]:
    """Where these ranks are, as far as they answer within `PATIENCE` seconds."""
    for rank in ranks:
        store.set(f"where?/{rank}", "")
    deadline, found = time.monotonic() + PATIENCE, {}
    while len(found) < len(ranks) and time.monotonic() < deadline:
        for rank in ranks - found.keys():
            if store.check([f"where/{rank}"]):
                found[rank] = store.get(f"where/{rank}").decode()
        time.sleep(0.05)
    return found
