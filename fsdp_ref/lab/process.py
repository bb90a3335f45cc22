"""What a process of the pool runs: the controller (`python -P process.py KERNEL_PID HOME`) or an engine (`be_engine`).

The controller is started as a script, not as a module of the package, so that the watch over the notebook's kernel stands before anything
slow or fallible is imported; nothing may be imported here at the top that is. It must never outlive the kernel: whatever kills the
kernel, this process ends within a second.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil

POLL = 0.5              # seconds between two looks at the kernel


def watch(kernel: int) -> None:
    """End this process, at once and whatever it is doing, when the kernel's process is gone (a zombie is gone)."""
    try:
        process = psutil.Process(kernel)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(POLL)
    except psutil.NoSuchProcess:
        pass
    for child in psutil.Process().children(recursive=True):       # whatever a cell started goes with its rank
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    os._exit(1)


class InThread(threading.Thread):
    """Stands in for multiprocessing.Process where ipyparallel starts its heart monitor. As a process of its own it would have no
    watch over the kernel, and would stay behind when the controller is killed."""

    def terminate(self) -> None:
        """A daemon thread ends with its process."""


def controller(home: Path) -> None:
    """ipyparallel's hub, schedulers and heart monitor, as threads of one process, on the loopback interface and free ports."""
    from ipyparallel.controller import app
    app.Process = InThread
    app.IPController.launch_instance([
        f"--profile-dir={home / 'profile'}", "--ip=127.0.0.1", "--location=127.0.0.1", "--IPController.use_threads=True",
        "--IPController.db_class=NoDB", "--IPController.log_level=CRITICAL",
        # An engine counts as registered at its second heartbeat, so they are close together; who is dead, the kernel sees by itself.
        "--HeartMonitor.period=250", "--HeartMonitor.max_heartmonitor_misses=1000000"])


def be_engine(kernel: int, home: str, rank: int, environment: dict[str, str]) -> None:
    """One rank: an ipyparallel engine whose id is its rank. The kernel's environment, a session and a log of its own."""
    os.setsid()
    watch_in_background(kernel)
    os.environ.clear()
    os.environ.update(environment, OMP_NUM_THREADS="1", IPYTHONDIR=str(Path(home, "ipython")))
    with open(Path(home, f"rank-{rank}.log"), "wb", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    stack = open(Path(home, f"stack-{rank}"), "w")                # open for as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import torch
    torch.set_num_threads(1)
    from ipyparallel.engine.app import IPEngine

    sys.argv = ["rank"]
    IPEngine.launch_instance([
        f"--profile-dir={Path(home, 'profile')}", f"--IPEngine.id={rank}", "--IPEngine.wait_for_url_file=60", "--IPEngine.timeout=30",
        "--IPEngine.enable_nanny=False", "--IPEngine.max_heartbeat_misses=0", "--IPEngine.log_level=ERROR"])


def watch_in_background(kernel: int) -> None:
    """Start the watch over the kernel."""
    threading.Thread(target=watch, args=(kernel,), name="die-with-kernel", daemon=True).start()


if __name__ == "__main__":
    watch_in_background(int(sys.argv[1]))
    controller(Path(sys.argv[2]))
