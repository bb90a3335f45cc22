"""Ranks behind a notebook: processes that keep their variables between cells, joined in one process group.

ipyparallel brings the engines and carries code and results; ours are the process group, the limits on every wait, and what happens
when a rank raises, dies or hangs: one report, and a fresh pool. Collectives never run in the notebook's kernel, which therefore
can always be interrupted: a rank blocked in gloo ignores signals until the process group's time limit, so it is killed, not asked.

[Note: why a broken pool is replaced whole] After a failed collective a process group cannot be used again, and models hold on to
the group they were built with. Keeping the surviving ranks' variables would leave objects that fail later in odd ways; a fresh
pool with nothing in it is the same state on every rank.

[Note: two limits] A cell gets 15 s unless it is given more. A collective gives up after 10 s: the ranks then need at most 4.5 s to find
out who did not come and where it is, so that report comes before the pool's own limit, which only knows who is still at work.

[Note: after a disagreement] Ranks that were about to make different calls are told before anything is sent, all of them, with the same
words. If they have begun equally many calls besides, their process groups are as good as before, and the pool is kept with its variables.
"""

from __future__ import annotations

import atexit
import signal
import time
from collections.abc import Callable, Sequence

from ipyparallel import AsyncResult
from IPython import get_ipython

from ..errors import ConfigError, WorldError
from . import cells
from .diagnose import running_of
from .engines import Engines, step
from .magics import RankMagics
from .output import show
from .processes import sweep
from .report import Failure, RanksFailed, explain, is_group_error

TIMEOUT, LIMIT = 10.0, 15.0     # seconds, see [Note: two limits]
GRACE = 8.0             # seconds the others get once one rank's collective has failed (their own failures arrive within this)
SETTLE = 2.0            # seconds the others get once one rank has raised, before they are taken to wait for it in vain
IN_STEP = 5.0           # seconds the ranks may take to say how many collectives they have begun
LINGER = 0.5            # seconds the survivors get to say what the death of a rank did to them
OUTPUT = 3.0            # seconds printed text may arrive after the result


class Ranks:
    """A pool of `size` ranks; `start` makes one. `backend` and `device` are what the ranks compute with."""

    def __init__(self, size: int, timeout: float, limit: float, device: str) -> None:
        self.size, self.timeout, self.limit = size, timeout, limit
        self._choice = device
        self._cells: dict[str, str] = {}                        # name of a cell's file, as the ranks call it -> its text
        self._engines: Engines | None = None
        self._stopped = False
        self._bring_up()
        atexit.register(self.stop)

    def _bring_up(self) -> None:
        self._engines = Engines.start(self.size, self.timeout, self._choice, self._register)
        self.backend, self.device = self._engines.backend, self._engines.device

    def _register(self) -> None:
        """Put this pool behind `%%px`."""
        get_ipython().register_magics(RankMagics(get_ipython(), self))

    # -- what a notebook calls --------------------------------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        """The process id of each rank; empty once stopped."""
        return list(self._engines.processes.pids) if self._engines else []

    def run(self, function: Callable, /, *args, timeout: float | None = None, ranks: Sequence[int] | None = None, **kwargs) -> list:
        """Call `function(*args, **kwargs)` on every rank (or on `ranks`) and return the results in rank order.

        The function may be defined in a cell (it then sees the variables of the rank it runs on: rank, world_size, torch, ...;
        other functions of cells that it calls by name come with it) or in an importable module.

        Args:
            timeout: seconds the call may take; default the pool's limit.

        Raises:
            RanksFailed: a rank raised, died or did not finish; the message says which, and whether the pool was restarted.
        """
        targets = self._targets(ranks)
        client, helpers = self._engines.client, cells.helpers(function)
        texts = cells.texts([function, *helpers.values()])
        for rank in targets if texts or helpers else ():
            client[rank].apply_async(cells.learn, texts)
            client[rank].push(helpers, block=False)
        return self._finish({rank: client[rank].apply_async(function, *args, **kwargs) for rank in targets}, timeout or self.limit)

    def execute(self, code: str, ranks: Sequence[int] | None = None, limit: float | None = None) -> None:
        """Run a cell's text on every rank (or on `ranks`) and show what each printed, in rank order. `%%px` calls this.

        Raises:
            RanksFailed: as `run` does.
            ConfigError: the cell awaits something at its top level, which the engines cannot do.
        """
        targets = self._targets(ranks)
        if cells.awaits(code):
            raise ConfigError("a cell for the ranks cannot use await outside of a function; wrap it: asyncio.run(your_coroutine())")
        client = self._engines.client
        self._cells[cells.name_of(code)] = code
        self._finish({rank: client[rank].execute(code, silent=False, block=False) for rank in targets}, limit or self.limit)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one rank, to see what its death does to the others; `heal` or the next use of the pool tells."""
        self._targets([rank])
        self._engines.processes.signal(rank, number)
        deadline = time.monotonic() + 5
        while number == signal.SIGKILL and rank not in self._engines.processes.dead() and time.monotonic() < deadline:
            time.sleep(0.01)

    def heal(self) -> None:
        """Restart the pool if a rank has died since it was last used, and print the report; else say that all is well."""
        self._must_be_up()
        dead = self._engines.processes.dead()
        print(self._replace(Failure(dead=dead)) if dead else f"all {self.size} ranks are well", flush=True)

    def stop(self) -> None:
        """End the ranks and remove their files. Safe to call twice."""
        engines, self._engines, self._stopped = self._engines, None, True
        if engines is not None:
            engines.close()
        atexit.unregister(self.stop)

    def __repr__(self) -> str:
        if self._engines is None:
            return "<ranks: stopped>" if self._stopped else "<ranks: to be restarted when they are next used>"
        return f"{self.size} ranks are ready: backend {self.backend}, device {self.device}, {self.timeout:g} s for a collective"

    # -- working ----------------------------------------------------------------------------------------------------------------

    def _must_be_up(self) -> None:
        if self._stopped:
            raise WorldError("this pool of ranks was stopped; start another: lab = start(ranks=4)")
        if self._engines is None:                               # an interrupt, or a machine too busy, ended its last restart
            self._bring_up()

    def _targets(self, ranks: Sequence[int] | None) -> list[int]:
        """The ranks that were asked for, in order. Raises when one does not exist, or has died since the pool was last used."""
        self._must_be_up()
        targets = list(range(self.size)) if ranks is None else sorted(set(ranks))
        if not targets or not set(targets) <= set(range(self.size)):
            raise ConfigError(f"ranks {ranks} do not fit this pool; it has ranks 0 to {self.size - 1}")
        if dead := self._engines.processes.dead():
            self._raise(Failure(dead=dead))
        return targets

    def _finish(self, work: dict[int, AsyncResult], limit: float) -> list:
        """Wait for a piece of work, show its output, return its results in rank order or raise the report."""
        failure = self._watch(work, limit)
        deadline = time.monotonic() + (LINGER if failure.dead or failure.stuck else OUTPUT)
        for rank, call in work.items():
            call.wait_for_output(max(deadline - time.monotonic(), 0))
            show(rank, call.metadata)
        if failure:
            self._raise(failure)
        return [call.get(timeout=5) for call in work.values()]

    def _watch(self, work: dict[int, AsyncResult], limit: float) -> Failure:
        """Wait until every rank has answered, one has died, the limit is over or the notebook is interrupted. Never longer than
        the limit plus a few seconds."""
        begin = time.monotonic()
        deadline, settled = begin + limit, None
        processes, failure = self._engines.processes, Failure(cells=dict(self._cells))
        try:
            while running := [rank for rank, call in work.items() if not call.done()]:
                now = time.monotonic()
                if processes.dead():
                    deadline = min(deadline, now + LINGER)
                elif errors := _errors(work):
                    deadline = min(deadline, now + GRACE) if any(is_group_error(*each[:2]) for each in errors.values()) else deadline
                    settled = settled or now + SETTLE
                    if now > settled and all(running_of(processes.stack(rank), self._cells).waits_in for rank in running):
                        break                                   # for a rank that raised, and will not come
                    settled = settled if now <= settled else now + SETTLE
                if now > deadline:
                    break
                time.sleep(0.01)
        except KeyboardInterrupt:
            failure.interrupted = True
        failure.after = time.monotonic() - begin
        failure.dead = processes.dead()
        failure.errors = {rank: error for rank, error in _errors(work).items() if rank not in failure.dead}
        failure.finished = [rank for rank in work if rank not in running and rank not in failure.errors and rank not in failure.dead]
        if not failure.dead:
            failure.stuck = {rank: processes.stack(rank) for rank in running}
        return failure

    # -- after a failure --------------------------------------------------------------------------------------------------------

    def _raise(self, failure: Failure) -> None:
        """Report a failure; when the process group cannot be used again, restart the pool first."""
        self._describe(failure)
        report = explain(failure)
        broken = failure.group_broken and not (failure.disagreed and len(failure.errors) == self.size and self._in_step())
        message = self._replace(failure) if broken else f"{report.diagnosis}; the pool goes on, its variables are kept"
        raise RanksFailed(message, report, broken)

    def _in_step(self) -> bool:
        """Whether all ranks have begun equally many collectives. [Note: after a disagreement]"""
        calls = [self._engines.client[rank].apply_async(step) for rank in range(self.size)]
        try:
            counts = [call.get(timeout=IN_STEP) for call in calls]
        except Exception:                                       # no answer in time, or an error: not in step
            return False
        return all(count == counts[0] for count in counts)

    def _describe(self, failure: Failure) -> None:
        """Add what is known only while the pool's files are there."""
        failure.pids = self.pids
        if failure.dead:
            failure.output = self._engines.processes.output(f"rank-{min(failure.dead)}")

    def _replace(self, failure: Failure) -> str:
        """Kill what is left of the pool, bring up a fresh one, return the report."""
        self._describe(failure)
        message = str(explain(failure).diagnosis)
        begin = time.monotonic()
        self._engines.close()
        self._engines = None
        try:
            self._bring_up()
        except WorldError as error:
            return f"{message}; and the pool could not be restarted: {error}"
        return (f"{message}; the pool was restarted in {time.monotonic() - begin:.0f} s and the variables on all ranks are gone: "
                "run the cells that set them up again")


def _errors(work: dict[int, AsyncResult]) -> dict[int, tuple[str, str, str]]:
    """What the ranks that have answered raised: name, text and traceback."""
    found = {}
    for rank, call in work.items():
        error = call.exception(timeout=0) if call.done() else None
        if error is not None:
            name, text = getattr(error, "ename", type(error).__name__), str(getattr(error, "evalue", error))
            found[rank] = (name, text, getattr(error, "traceback", "") or "")
    return found


_pool: Ranks | None = None


def start(ranks: int = 4, *, timeout: float = TIMEOUT, limit: float = LIMIT, device: str = "auto") -> Ranks:
    """Bring up `ranks` ranks behind `%%px` and print one ready line. Called again with the same values, the pool stays as it is
    (with its variables); with other values it is replaced.

    Under `%%px` every rank finds rank, world_size, device, torch, dist and the names of fsdp_ref.

    Args:
        timeout: seconds a collective may wait for the slowest rank. [Note: two limits]
        limit: seconds a cell or a call may take; `%%px --limit 60` and `lab.run(..., timeout=60)` give one of them more.
        device: auto (GPUs when there is one for each rank, else the CPU), cpu or cuda.

    Raises:
        ConfigError: a value that cannot work. WorldError: the ranks did not come up in time.
    """
    global _pool
    if not isinstance(ranks, int) or not 1 <= ranks <= 64:
        raise ConfigError(f"ranks={ranks!r} cannot be started; give a whole number from 1 to 64 (4 is plenty for the lessons)")
    if timeout <= 0 or limit <= 0:
        raise ConfigError(f"timeout={timeout:g} and limit={limit:g} must both be more than 0 seconds; leave them out for {TIMEOUT:g} and "
                          f"{LIMIT:g}")
    sweep()
    if _pool is not None and _pool.pids and (_pool.size, _pool.timeout, _pool._choice) == (ranks, timeout, device):
        _pool.limit = limit
        if _pool._engines.processes.dead():
            _pool.heal()
    else:
        if _pool is not None:
            _pool.stop()
        _pool = Ranks(ranks, timeout, limit, device)
    print(_pool, flush=True)
    return _pool
