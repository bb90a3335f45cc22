"""A rank that leaves says why: in the store, before it goes, so that those who wait for it can tell what happened to it.

    rank 1: raised ValueError: no such file at line 14 of train.py        (written by sys.excepthook)
    rank 2: came to the end of its program                                (written at exit)

A rank that is killed, or calls os._exit, says nothing. Below the traceback of the rank at fault stands one line with its number; of a
rank that fails only for want of another, that one line is all that is printed. This module must never wait, and never change how the
process ends.
"""

from __future__ import annotations

import atexit
import sys
from types import TracebackType

import torch.distributed as dist

from .errors import FsdpRefError, RankError
from .source import Place, is_users, tell
from .words import first_line

_store: dist.Store | None = None
_rank = 0
_before = sys.excepthook


def promise(store: dist.Store, rank: int) -> None:
    """From now on this process, which is `rank`, says why it leaves."""
    global _store, _rank, _before
    if sys.excepthook is not _hook:
        _before, sys.excepthook = sys.excepthook, _hook
        atexit.register(say)
    _store, _rank = store, rank


def say(error: BaseException | None = None) -> None:
    """Write why this rank leaves its world: for an error, or because its program is over. The first reason stays."""
    global _store
    store, _store = _store, None
    if store is None:
        return
    ended = error is None or isinstance(error, SystemExit)
    words = "came to the end of its program" if ended else words_of(error)
    try:
        store.set(f"left/{_rank}", words)
    except Exception:                                       # the store went first: nobody is left to read it
        return


def words_of(error: BaseException) -> str:
    """`raised ValueError: no such file at line 14 of train.py`."""
    place = tell(_places(error.__traceback__))
    return f"raised {type(error).__name__}: {first_line(error)}{' at ' if place else ''}{place}"


def of(store: dist.Store, rank: int) -> str:
    """What `rank` said when it left; empty when it has said nothing."""
    return store.get(f"left/{rank}").decode() if store.check([f"left/{rank}"]) else ""


def _places(trace: TracebackType | None) -> list[Place]:
    """The user's lines through which the error came, innermost first."""
    found: list[Place] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_users(code.co_filename):
            found.insert(0, Place(code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return found


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    rank = _rank
    if not isinstance(error, RankError):                    # a rank that suffers from another one has told so already
        say(error)
    if isinstance(error, FsdpRefError):
        print(f"rank {rank}: {kind.__name__}: {error}", file=sys.stderr, flush=True)
    else:
        _before(kind, error, trace)
        if not isinstance(error, KeyboardInterrupt):
            print(f"rank {rank} {words_of(error)}", file=sys.stderr, flush=True)
