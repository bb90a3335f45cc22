"""The operating-system side of the pool: start its processes, tell which of them died, kill them, sweep what a killed kernel left.

It knows processes and files, nothing of process groups or notebooks. It must never signal a process it did not start.

[Note: one import for all ranks] Importing torch and what an engine needs takes five seconds of CPU. On Linux the standard library's
fork server imports them once and forks every engine, also those of a pool that is restarted; it computes nothing, so nothing breaks by
forking. Elsewhere each engine imports for itself.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import psutil

from . import process as programs

SCRIPT = Path(__file__).with_name("process.py")
PREFIX = "fsdp-ref-lab"
_METHOD = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
_METHOD.set_forkserver_preload(["fsdp_ref.lab.preload"])


def _machine() -> str:
    """A short name for this machine: temporary folders may be shared between containers, process ids are not."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def make_home() -> Path:
    """A private temporary folder whose name says which process owns it, so that it can be swept when that process is gone."""
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}-{_machine()}-{os.getpid()}-"))


def sweep() -> list[Path]:
    """Remove the folders that pools of this user on this machine left behind (their kernel was killed); return what was removed."""
    removed = []
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}-{_machine()}-*"):
        owner = folder.name.split("-")[4]
        try:
            mine = folder.lstat().st_uid == os.getuid() and not folder.is_symlink()
        except FileNotFoundError:                              # swept by another kernel at the same moment
            continue
        if mine and owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


def _tree(process: subprocess.Popen | multiprocessing.Process) -> list[psutil.Process]:
    """A process that is still running, with its descendants; empty when it has ended (its id may be somebody else's by now)."""
    if (process.poll() if isinstance(process, subprocess.Popen) else process.exitcode) is not None:
        return []
    try:
        top = psutil.Process(process.pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


class Processes:
    """One controller and `ranks` engines. `pids[r]` is the process of rank r."""

    def __init__(self, ranks: int) -> None:
        self.home = make_home()
        (self.home / "profile").mkdir()                        # an engine may be up before the controller has made it
        self.ranks = ranks
        self._controller = self._start_controller()
        self._engines = [self._start_engine(rank) for rank in range(ranks)]
        self.pids = [engine.pid for engine in self._engines]

    @property
    def client_file(self) -> Path:
        """Where the controller writes how a client reaches it (readable by this user alone)."""
        return self.home / "profile" / "security" / "ipcontroller-client.json"

    def client_file_complete(self) -> bool:
        """Whether the controller has written that file to its end."""
        try:
            return bool(json.loads(self.client_file.read_text()))
        except (OSError, ValueError):
            return False

    def _start_controller(self) -> subprocess.Popen:
        """In a session of its own: an interrupt of the notebook is for the kernel, which decides what follows."""
        environment = {**os.environ, "IPYTHONDIR": str(self.home / "ipython"), "PYTHONUNBUFFERED": "1"}
        with open(self.home / "controller.log", "wb") as log:
            return subprocess.Popen([sys.executable, "-P", str(SCRIPT), str(os.getpid()), str(self.home)], stdin=subprocess.DEVNULL,
                                    stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)

    def _start_engine(self, rank: int) -> multiprocessing.Process:
        """In a session of its own too. [Note: one import for all ranks]"""
        engine = _METHOD.Process(target=programs.be_engine, args=(os.getpid(), str(self.home), rank, dict(os.environ)))
        threads = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"                    # read when torch is imported
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__") # or multiprocessing would run the user's script again in every engine
        try:
            engine.start()
        finally:
            sys.modules["__main__"] = main
            if threads is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = threads
        return engine

    def dead(self) -> dict[int, int]:
        """Ranks whose process has ended, with its status: minus the signal that killed it, else what it passed to exit."""
        return {rank: engine.exitcode for rank, engine in enumerate(self._engines) if engine.exitcode is not None}

    def controller_ended(self) -> bool:
        """Whether the controller is gone."""
        return self._controller.poll() is not None

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to one rank; nothing happens when it is dead already."""
        if self._engines[rank].exitcode is None:
            os.kill(self._engines[rank].pid, number)

    def output(self, name: str, lines: int = 5) -> str:
        """The last lines that "controller" or "rank-R" wrote outside of any cell (a C++ abort writes there)."""
        try:
            text = (self.home / f"{name}.log").read_text(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.strip().splitlines()[-lines:])

    def stack(self, rank: int, wait: float = 1.0) -> str:
        """The Python stack of one rank, most recent call first, whatever it is blocked in; empty when it does not answer."""
        file = self.home / f"stack-{rank}"
        try:
            before = file.stat().st_size
            self.signal(rank, signal.SIGUSR1)
            deadline = time.monotonic() + wait
            while file.stat().st_size == before and time.monotonic() < deadline:
                time.sleep(0.02)
            time.sleep(0.05)                                   # let it finish writing
            return file.read_text(errors="replace")[before:]
        except OSError:
            return ""

    def kill(self) -> None:
        """Kill what this object started, and what that started in turn, and wait until it is gone. Safe to call twice."""
        started = [self._controller, *self._engines]
        for process in started:
            for victim in _tree(process):
                try:
                    victim.kill()
                except psutil.NoSuchProcess:
                    continue
        self._controller.wait(10)
        for engine in self._engines:
            engine.join(10)

    def close(self) -> None:
        """Kill, and remove the folder."""
        self.kill()
        shutil.rmtree(self.home, ignore_errors=True)
