"""Bringing a pool up: processes, then ipyparallel's client, then the process group. Once up it is only used and closed.

Every wait here has a limit, and a process that dies meanwhile ends the wait at once with its last words.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import ipyparallel as ipp
from IPython import get_ipython

from ..errors import WorldError
from .processes import Processes

START = 60.0            # seconds the processes may take to come up
JOIN = 30.0             # seconds the ranks may take to form a process group, at least


class Engines:
    """`size` engines, engine r being rank r of one process group. `register` is called before the client is made (see below).

    Raises:
        WorldError: a process ended or did not answer in time; whatever was started has been stopped.
    """

    def __init__(self, size: int, timeout: float, device: str, register: Callable[[], None]) -> None:
        self.size = size
        self.client: ipp.Client | None = None
        self.processes = Processes(size)
        try:
            self._connect(register)
            facts = self._join(timeout, device)
        except BaseException:
            self.close()
            raise
        self.backend, self.device = facts["backend"], facts["device"].split(":")[0]

    @classmethod
    def start(cls, *args) -> Engines:
        """Bring a pool up; a second try is made when the first fails (a port found free may be taken before it is used)."""
        try:
            return cls(*args)
        except (OSError, WorldError) as error:
            if isinstance(error.__cause__, ipp.error.RemoteError):      # a rank said no: it would say so again
                raise
            return cls(*args)

    def close(self) -> None:
        """Kill the processes, close the client, remove the files. Safe to call twice."""
        client, self.client = self.client, None
        self.processes.kill()
        if client is not None:
            client.close(linger=0)
        self.processes.close()

    def _wait(self, ready: Callable[[], bool], limit: float, what: str) -> None:
        """Return when `ready()` holds; raise when a process ends before, or after `limit` seconds."""
        deadline = time.monotonic() + limit
        while not ready():
            for rank in self.processes.dead():
                words = self.processes.output(f"rank-{rank}") or "it printed nothing"
                raise WorldError(f"rank {rank} ended while {what} ({words}); run fsdp-ref doctor to see what this machine lacks")
            if self.processes.controller_ended():
                raise WorldError(f"the controller of the ranks ended while {what} ({self.processes.output('controller')}); try again")
            if time.monotonic() > deadline:
                raise WorldError(f"{what} took longer than {limit:g} s; close other programs, or start fewer ranks")
            time.sleep(0.05)

    def _connect(self, register: Callable[[], None]) -> None:
        """Wait for the controller and every engine. ipyparallel's client registers its own `%%px`, which has no limits, unless
        there is one: so ours comes first."""
        self._wait(self.processes.client_file_complete, START, "starting")
        if get_ipython() is not None:
            register()
        self.client = ipp.Client(str(self.processes.client_file), timeout=30)
        self._wait(lambda: len(self.client.ids) == self.size, START, "starting")

    def _join(self, timeout: float, device: str) -> dict[str, str]:
        """Have every rank join the process group; return what rank 0 says about it."""
        store = str(self.processes.home / "store")
        calls = [self.client[rank].apply_async(_join, rank, self.size, store, timeout, device) for rank in range(self.size)]
        self._wait(lambda: all(call.done() for call in calls), max(timeout, JOIN) + 10, "joining the process group")
        try:
            return [call.get(timeout=5) for call in calls][0]
        except ipp.error.RemoteError as error:
            raise WorldError(str(error.evalue)) from error


def _join(*facts: object) -> dict[str, str]:
    """Runs in a rank. The notebook's kernel knows it by name alone, so that it need not import torch."""
    from fsdp_ref.lab import member
    return member.join(*facts)


def step() -> dict[str, int]:
    """Runs in a rank: how many collectives each of its process groups has begun."""
    from fsdp_ref import collectives
    return collectives.counts()
