"""The fork server: imports torch once, computes nothing, and forks the ranks of every case.

    python -P server.py JUDGE_PID        standard input is one end of a pair of Unix sockets; the judge holds the other

One request at a time: {"ranks": N} with 2 N open files (N lines, N outputs) forks N ranks and answers {"pids": [...]}; {"stop": true}
kills what is left of them and answers {"statuses": [...]}: minus the signal that ended each, else its exit status, None for one that was
still running. A closed line ends the server and its ranks. It must never read anything that a rank wrote.
"""

from __future__ import annotations

import array
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

MAX_FILES = 64
# What torch imports only when it is first needed (by an optimizer, by `backward(gradient)`): a rank has neither the time nor the right to.
LATE = ("torch._dynamo", "torch.fx.experimental.symbolic_shapes")


def load_package() -> None:
    """Make this folder the package `inside`, without a path from which the judges beside it could be imported."""
    folder = Path(__file__).parent
    sys.path = list(dict.fromkeys([str(folder.parents[3]), *sys.path]))            # where fsdp_ref is
    spec = importlib.util.spec_from_file_location("inside", folder / "__init__.py", submodule_search_locations=[str(folder)])
    sys.modules["inside"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["inside"])


def serve(judge: socket.socket) -> None:
    """Answer requests until the judge is gone."""
    for module in sorted(Path(__file__).parent.glob("*.py")):         # harnesses too: a rank need not read them
        if module.stem not in ("server", "__init__"):
            importlib.import_module(f"inside.{module.stem}")
    for name in LATE:
        importlib.import_module(name)
    from inside import kernel, program
    kernel.die_with_parent()
    judge.sendall(b'{"ready": true}\n')
    pids: list[int] = []
    while True:
        text, files = receive(judge)
        if not text:
            stop(pids)
            os._exit(0)
        request = json.loads(text)
        if "ranks" in request:
            pids = start(judge, request["ranks"], files, program)
            answer: dict = {"pids": pids}
        else:
            if request.get("stack"):
                signal_all(pids, signal.SIGUSR1)
                time.sleep(0.1)
            answer, pids = {"statuses": stop(pids, request.get("leaving", []))}, []
        judge.sendall(json.dumps(answer).encode() + b"\n")


def receive(judge: socket.socket) -> tuple[bytes, list[int]]:
    """One request (a line of JSON) and the open files that came with it."""
    room = socket.CMSG_SPACE(MAX_FILES * array.array("i").itemsize)
    text, ancillary, _, _ = judge.recvmsg(4096, room)
    files = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            files.frombytes(data[:len(data) - len(data) % files.itemsize])
    return text, list(files)


def start(judge: socket.socket, ranks: int, files: list[int], program) -> list[int]:
    """Fork the ranks; each keeps its own two files alone."""
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            try:
                line, output = files[rank], files[ranks + rank]
                for other in {*files, judge.fileno()} - {line, output}:
                    os.close(other)
                judge.detach()
                nothing = os.open(os.devnull, os.O_RDONLY)
                os.dup2(nothing, 0)
                program.be_rank(socket.socket(fileno=line), output)
            except BaseException:                      # before the answer was touched: ours
                os.write(output, traceback.format_exc().encode())
            finally:
                os._exit(70)
        pids.append(pid)
    for each in files:
        os.close(each)
    return pids


def signal_all(pids: list[int], number: int) -> None:
    """Send a signal to every rank that runs, and to whatever it started (a rank is the leader of its session)."""
    for pid in pids:
        for send in ((os.kill,) if number == signal.SIGUSR1 else (os.killpg, os.kill)):
            try:
                send(pid, number)
            except (ProcessLookupError, PermissionError):
                continue


def stop(pids: list[int], leaving: list[int] = ()) -> list[int | None]:
    """How each rank had ended; those that had not are killed. A rank that is `leaving` is given a second: the system closes the files of
    a process before it says how the process ended."""
    found: dict[int, int | None] = {}
    until = time.monotonic() + 1.0
    for rank, pid in enumerate(pids):
        done, status = os.waitpid(pid, os.WNOHANG)
        while not done and rank in leaving and time.monotonic() < until:
            time.sleep(0.01)
            done, status = os.waitpid(pid, os.WNOHANG)
        found[pid] = os.waitstatus_to_exitcode(status) if done else None
    signal_all([pid for pid in pids if found[pid] is None], signal.SIGKILL)
    for pid in pids:
        if found[pid] is None:
            os.waitpid(pid, 0)
    return [found[pid] for pid in pids]


if __name__ == "__main__":
    load_package()
    serve(socket.socket(fileno=0))
