"""The judge's hold on the fork server (inside/server.py): start it, ask it for ranks, have them ended.

One server a process, started when the first check needs it and ended with the process. It must never wait for it without a limit.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from ...errors import WorldError
from ..processes import sweep

SERVER = Path(__file__).with_name("inside") / "server.py"
START = 120.0                   # seconds the server may take to import torch
ANSWER = 30.0                   # seconds it may take to fork or to kill

# What the ranks see of the environment; anything else may be a secret
KEPT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LANG", "LC_ALL", "TZ",
        "TMPDIR")

_server: Server | None = None


class Server:
    """The fork server's process, and our end of its line."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._line, theirs = socket.socketpair()
        environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        self._process = subprocess.Popen([sys.executable, "-P", str(SERVER), str(self.owner)], stdin=theirs, stdout=subprocess.DEVNULL,
                                         stderr=subprocess.PIPE, start_new_session=True, env=environment | {"OMP_NUM_THREADS": "1"})
        theirs.close()
        self._read(START)

    def _read(self, limit: float) -> dict:
        self._line.settimeout(limit)
        try:
            text = self._line.recv(65536)
        except TimeoutError:
            text = b""
        if not text:
            self.stop()
            said = self._process.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
            raise WorldError(f"the process that starts the ranks of a check is gone ({said[0] if said else 'it said nothing'}); "
                             "check again, and run fsdp-ref doctor if it happens twice")
        return json.loads(text)

    def start(self, files: list[int], ranks: int) -> list[int]:
        """Fork `ranks` ranks: their lines, then their outputs."""
        socket.send_fds(self._line, [json.dumps({"ranks": ranks}).encode()], files)
        return self._read(ANSWER)["pids"]

    def end_ranks(self, stack: bool, leaving: list[int]) -> list[int | None]:
        """Kill what still runs; how each rank had ended before that. Ranks that are `leaving` have closed their line: they get a moment."""
        self._line.sendall(json.dumps({"stop": True, "stack": stack, "leaving": leaving}).encode())
        return self._read(ANSWER)["statuses"]

    @property
    def usable(self) -> bool:
        """Whether it runs and is this process's own."""
        return self.owner == os.getpid() and self._process.poll() is None

    def stop(self) -> None:
        """End the server and its ranks."""
        if self.owner == os.getpid():
            self._line.close()
            try:
                self._process.wait(2)
            except subprocess.TimeoutExpired:
                self._process.kill()                            # its ranks end with it
                self._process.wait(60)


def server() -> Server:
    """The server of this process, started when it is first needed."""
    global _server
    if _server is None or not _server.usable:
        sweep()                                                # the folders of judges that were killed
        _server = Server()
        atexit.register(_server.stop)
    return _server
