"""Runs an answer on fresh ranks, each a process with limits, and brings back the evidence.

The ranks are forked from a server that has torch imported (inside/server.py); their one line to the world is a socket to this process,
which carries and records every message (referee.py). A run ends when all ranks have returned, when nobody can go on, or at a limit; then
everything it started is dead. This module must never run a line of the answer, and never load anything but JSON and plain tensors.
"""

from __future__ import annotations

import os
import selectors
import shutil
import socket
import threading
import time
from pathlib import Path

from ..processes import make_home
from . import endings
from .exercise import Case
from .inside import frames
from .observe import Evidence
from .referee import Referee
from .serving import server
from .submission import Submission

PREPARED = 60.0                 # seconds the ranks may take until the answer begins
OUTPUT_LIMIT = 2**20            # bytes a rank may print
TRAFFIC_LIMIT = 2**26           # bytes a rank may send
SETTLE = 1.0                    # seconds the others get when a rank has failed
PATIENCE = "FSDP_REF_CHECK_PATIENCE"        # environment variable: multiplies the limits on time, for a machine that is busy

_lock = threading.Lock()


def run(submission: Submission, exercise: str, case: Case) -> Evidence:
    """Run the answer on the ranks of one case.

    Raises:
        WorldError: this machine cannot start the ranks.
    """
    with _lock:
        return Run(submission, exercise, case).go()


class Run:
    """One run: lines, outputs, clocks and folders."""

    def __init__(self, submission: Submission, exercise: str, case: Case) -> None:
        self.submission, self.exercise, self.case = submission, exercise, case
        self.referee = Referee(case.world)
        self.patience = max(1.0, float(os.environ.get(PATIENCE, 1)))
        self.selector = selectors.DefaultSelector()
        self.inbox = [bytearray() for _ in range(case.world)]
        self.outbox = [bytearray() for _ in range(case.world)]
        self.heard = [0] * case.world
        self.printed = [bytearray() for _ in range(case.world)]
        self.lines: list[socket.socket] = []
        self.outputs: list[int] = []
        self.timed_out = False
        self.closed: list[int] = []                          # ranks whose line came to its end

    def go(self) -> Evidence:
        """Start, carry, stop; the evidence."""
        home = make_home()
        try:
            statuses = self._from_start_to_end(home)
            self._drain()
            return endings.finish(self.referee.evidence, self.submission, self.case, statuses, self.printed, home)
        finally:
            for line in self.lines:
                line.close()
            for output in self.outputs:
                os.close(output)
            self.selector.close()
            shutil.rmtree(home, ignore_errors=True)

    def _from_start_to_end(self, home: Path) -> list[int | None]:
        """How each rank ended. Whatever happens meanwhile, an interrupt say, no rank goes on."""
        try:
            self._start(home)
            self._carry()
            leaving = [rank for rank in self.closed if not self.referee.evidence.ranks[rank].returned]
            return server().end_ranks(self.timed_out, leaving)
        except BaseException:
            server().stop()
            raise

    def _start(self, home: Path) -> None:
        theirs, world = [], self.case.world
        pairs, pipes = [socket.socketpair() for _ in range(world)], [os.pipe() for _ in range(world)]
        theirs = [pair[1].detach() for pair in pairs] + [pipe[1] for pipe in pipes]
        self.lines, self.outputs = [pair[0] for pair in pairs], [pipe[0] for pipe in pipes]
        try:
            server().start(theirs, world)
        finally:
            for each in theirs:
                os.close(each)
        for rank in range(world):
            folder = home / ("shared" if self.case.one_folder else f"rank-{rank}")
            folder.mkdir(exist_ok=True)
            for name, content in self.case.files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
            each = self.case.each[rank] if self.case.each else {}
            self.outbox[rank] += frames.pack({
                "exercise": self.exercise, "source": self.submission.text, "name": self.submission.name, "rank": rank, "world": world,
                "home": str(folder), "case": {**self.case.shared, **each}, "memory": self.case.memory,
                "cpu": self.case.cpu, "files": self.case.file_size})
            self.lines[rank].setblocking(False)
            self.selector.register(self.lines[rank], selectors.EVENT_READ | selectors.EVENT_WRITE, (rank, "line"))
            os.set_blocking(self.outputs[rank], False)
            self.selector.register(self.outputs[rank], selectors.EVENT_READ, (rank, "output"))

    # -- carrying -------------------------------------------------------------------------------------------------------------------

    def _carry(self) -> None:
        """Carry messages until the run is over."""
        deadline, settled, begun = time.monotonic() + PREPARED, False, False
        while not self.referee.over:
            for key, mask in self.selector.select(max(0.0, min(0.5, deadline - time.monotonic()))):
                rank, what = key.data
                if what == "output":
                    self._read_output(rank)
                    continue
                if mask & selectors.EVENT_WRITE:
                    self._write(rank)
                if mask & selectors.EVENT_READ and key.fileobj in self.selector.get_map():
                    self._read(rank)
            self._hand_out()
            self.referee.look()
            if not begun and all(rank.ready for rank in self.referee.evidence.ranks):
                begun, deadline = True, time.monotonic() + self.case.limit * self.patience
            if not settled and any(rank.error for rank in self.referee.evidence.ranks):
                settled, deadline = True, min(deadline, time.monotonic() + SETTLE * self.patience)
            if time.monotonic() >= deadline and not self.referee.over:
                self.timed_out = True
                if not settled:
                    self.referee.fail("time", f"it was not done after {self.case.limit * self.patience:g} s")
                return

    def _read(self, rank: int) -> None:
        try:
            data = self.lines[rank].recv(2**18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(rank)
            return
        self.heard[rank] += len(data)
        inbox = self.inbox[rank]
        inbox += data
        try:
            if self.heard[rank] > TRAFFIC_LIMIT:
                raise frames.BadMessage("more bytes than a rank may send")
            head = frames.HEAD.size
            while len(inbox) >= head and not self.referee.over:
                text, raw = frames.sizes(bytes(inbox[:head]))
                if len(inbox) < head + text + raw:
                    return
                message = frames.unpack(bytes(inbox[head:head + text]), bytes(inbox[head + text:head + text + raw]))
                del inbox[:head + text + raw]
                self.referee.hear(rank, message)
                self.referee.look()
        except frames.BadMessage as error:
            self.referee.fail("message", f"rank {rank} wrote to the judge's line what no rank of an exercise writes ({error}); the answer "
                                         "must leave that line alone", rank)

    def _close(self, rank: int) -> None:
        if self.lines[rank] in self.selector.get_map():
            self.selector.unregister(self.lines[rank])
        self.referee.end(rank)
        self.closed.append(rank)

    def _write(self, rank: int) -> None:
        try:
            sent = self.lines[rank].send(self.outbox[rank][:2**18]) if self.outbox[rank] else 0
        except BlockingIOError:
            return
        except OSError:
            self.outbox[rank].clear()
            return
        del self.outbox[rank][:sent]
        if not self.outbox[rank]:
            self.selector.modify(self.lines[rank], selectors.EVENT_READ, (rank, "line"))

    def _hand_out(self) -> None:
        """Queue the answers the referee has for the ranks."""
        for rank, answers in self.referee.answers.items():
            for answer in answers:
                self.outbox[rank] += frames.pack(answer)
            if answers and self.lines[rank] in self.selector.get_map():
                self.selector.modify(self.lines[rank], selectors.EVENT_READ | selectors.EVENT_WRITE, (rank, "line"))
            answers.clear()

    def _read_output(self, rank: int) -> None:
        try:
            data = os.read(self.outputs[rank], 2**16)
        except BlockingIOError:
            return
        if not data and self.outputs[rank] in self.selector.get_map():
            self.selector.unregister(self.outputs[rank])
        self.printed[rank] += data
        if len(self.printed[rank]) > OUTPUT_LIMIT:
            self.referee.fail("flood", f"rank {rank} printed more than {OUTPUT_LIMIT // 2**20} MiB; print less, and not in a loop without "
                                       "end", rank)

    def _drain(self) -> None:
        """What the ranks had printed when they ended."""
        for rank, output in enumerate(self.outputs):
            while len(self.printed[rank]) < 2 * OUTPUT_LIMIT:
                try:
                    data = os.read(output, 2**16)
                except BlockingIOError:
                    break
                if not data:
                    break
                self.printed[rank] += data
