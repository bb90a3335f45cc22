"""One rank of one case, from the fork to its end: take the task, shut the walls, run the learner's function, send the evidence.

What is sent is raw: tensors, numbers, an exception's words. This process must never decide anything; the judge does. Nothing of the
judge's is in its memory.
"""

from __future__ import annotations

import faulthandler
import importlib
import linecache
import os
import random
import signal
import socket
import sys
import threading
import traceback

import torch

from . import kernel, limits, wire
from .channel import Channel
from .meter import Meter

SOURCE = "<your answer>"
_exit = os._exit


class Rank:
    """What a harness gets beside the function and the case: `rank`, `world`, `wire` (send, recv, collectives), `home` (a folder),
    `mark(name)` (a line in the record of what was sent) and `meter()` (a context that measures memory)."""

    def __init__(self, channel: Channel, rank: int, world: int, home: str) -> None:
        self.rank, self.world, self.home = rank, world, home
        self.wire = wire.Wire(channel, rank, world)
        self._put = channel.put
        self.meter = Meter

    def mark(self, name: str) -> None:
        """Note in the record of this rank's messages that it has come here."""
        self._put({"do": "mark", "name": name})


def be_rank(line: socket.socket, output: int) -> None:
    """Run one rank over this line; never returns. `output`: where everything printed goes."""
    os.setsid()
    kernel.die_with_parent()
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    faulthandler.register(signal.SIGXCPU, file=2, all_threads=False, chain=True)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
    channel = Channel(line)
    task = channel.task()
    put = channel.put
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    os.chdir(task["home"])
    harness = importlib.import_module(f".{task['exercise']}", __package__)
    rank = Rank(channel, task["rank"], task["world"], task["home"])
    wire.install(rank.wire)
    limits.restrict(task["memory"], task["cpu"], task["files"])
    limits.close_in(task["home"], lambda words: put({"do": "denied", "what": words}))
    put({"do": "ready"})
    try:
        function = load(task["source"], task["name"])
        evidence = harness.run(function, task["case"], rank)
        put({"do": "result", "value": evidence, "threads": threading.active_count() - 1})
    except BaseException as error:
        put({"do": "error", **told(error)})
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        _exit(0)


def load(source: str, name: str) -> object:
    """Run the submission's text and return its function. Errors in it count as the learner's."""
    linecache.cache[SOURCE] = (len(source), None, source.splitlines(keepends=True), SOURCE)
    space = {"__name__": "answer", "__file__": SOURCE}
    exec(compile(source, SOURCE, "exec"), space)
    if not callable(space.get(name)):
        raise NameError(f"there is no function {name} in the answer")
    return space[name]


def told(error: BaseException) -> dict:
    """An exception in words: its type, its text, and the last line of the submission it passed."""
    passed = [number for frame, number in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == SOURCE]
    if isinstance(error, SyntaxError) and error.filename == SOURCE:
        text, line, code = str(error.msg), error.lineno or 0, error.text or ""
    else:
        text, line = str(error), passed[-1] if passed else 0
        code = linecache.cache[SOURCE][2][line - 1] if line else ""
    return {"type": type(error).__name__, "text": text[:500], "line": line, "code": code.strip()[:200]}
