"""Bringing the ranks together: backend, store, interface, time limit; and finding out who is missing when it goes wrong.

The same call serves a script under torchrun, a rank behind a notebook, a test and a plain `python script.py` (a world of one).
No fixed port is ever used: ranks of one machine meet in a file, ranks under torchrun use the store that torchrun brings.
This module must never leave a wait without a limit.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist

from . import farewell, ledger, meeting, source, witness
from .errors import ConfigError, RankError, WorldError
from .words import first_line, name_ranks

T = TypeVar("T")
TIMEOUT = 60.0          # seconds a collective may wait for the slowest rank in a script; notebooks use 15
PR_SET_PDEATHSIG = 1    # linux/prctl.h
GRACE = 3.0             # seconds a failed rank waits for the others to say that they failed too


@dataclass
class World:
    """What `start` brought up.

    Attributes:
        device: where tensors belong: `cuda:<local rank>` with NCCL, `cpu` with gloo.
        store: what the ranks of this start tell each other outside collectives.
        job: the store that torchrun keeps through restarts; elsewhere the same as `store`.
        restarts: how often torchrun has started the ranks before.
    """

    rank: int
    size: int
    device: torch.device
    backend: str
    store: dist.Store
    timeout: float
    job: dist.Store
    restarts: int = 0
    witness: witness.Witness | None = None

    def remember(self, name: str, value: str) -> str:
        """The first value that any rank gave under this name since torchrun began, through all restarts."""
        return self.job.compare_set(f"remembered/{name}", "", value).decode()


_world: World | None = None
before_stop: list[Callable[[], None]] = []       # what `stop` calls while the process group still stands; must not raise


def current() -> World | None:
    """The world `start` brought up in this process, or None."""
    return _world


def loopback_interface() -> str | None:
    """Name of the loopback interface (`lo` on Linux, `lo0` on macOS); None when the machine has neither."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def choose_backend(local_size: int, device: str = "auto") -> str:
    """`nccl` when this machine has a GPU for each of its `local_size` ranks, else `gloo`.

    NCCL refuses two ranks on one GPU (NVIDIA/nccl#418), so a machine with fewer GPUs than ranks computes on the CPU.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device {device!r} is not known; choose auto, cpu or cuda")
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and gpus < local_size:
        raise ConfigError(f"device cuda needs a GPU for each of the {local_size} ranks and this machine has {gpus}; "
                          "start fewer ranks or use --device cpu")
    return "nccl" if gpus >= local_size else "gloo"


def start(rank: int | None = None, size: int | None = None, *, store: str | os.PathLike | None = None,
          timeout: float = TIMEOUT, device: str = "auto", give_up: Callable[[], bool] = lambda: False) -> World:
    """Join the world and return it; every rank must call this.

    With `rank`, `size` and `store` (a path that no file stands at yet, the same on every rank), ranks of one machine meet in
    that file. Without them the variables of torchrun are read; without those the process is a world of one. `give_up` is asked again
    and again while ranks are missing. From now on an error that ends this process is told to the other ranks too, and its last line
    names this one (farewell.py wraps sys.excepthook).

    Raises:
        Preempted: `give_up` said that nobody need wait any longer.
        WorldError: a rank did not arrive within `timeout` seconds; the message names the ones that did not.
    """
    global _world
    if _world is not None:
        raise WorldError("this process has joined a world already; call stop() before start()")
    under_torchrun = rank is None and "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if under_torchrun:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size or 1)) if under_torchrun else (size or 1)
    rank, size = rank or 0, size or 1
    if not 0 <= rank < size:
        raise WorldError(f"rank {rank} does not fit a world of {size}; ranks count from 0 to {size - 1}")
    backend = choose_backend(local_size, device)
    if local_size == size and (interface := loopback_interface()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)      # a bogus host name or a VPN must not matter on one machine
    home = torch.device("cuda", rank % max(local_size, 1)) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(home)
    job, shared, restarts = meeting.meet(rank, size, store, under_torchrun, timeout, give_up)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo", store=shared, rank=rank, world_size=size,
                                timeout=timedelta(seconds=timeout))
    except Exception as error:
        raise WorldError(f"rank {rank} could not join the process group ({first_line(error)}); "
                         "run fsdp-ref doctor to see what this machine lacks") from error
    watcher = _witness(shared, rank) if size > 1 else None
    _world = World(rank, size, home, backend, shared, timeout, job, restarts, watcher)
    ledger.set_rank(rank)
    if size > 1:
        farewell.promise(shared, rank)
    return _world


def stop() -> None:
    """Leave the world, after the checkpoint that is being written in the background. Safe to call twice, and after a failure."""
    global _world
    for finish in before_stop:
        finish()
    if _world is not None and _world.witness is not None:
        farewell.say(sys.exc_info()[1])
        _world.witness.stop()
    _world = None
    if dist.is_initialized():
        dist.destroy_process_group()


def _witness(store: dist.Store, rank: int) -> witness.Witness:
    """With a connection of its own; a file needs none, and a copy of it would take part in counting who still uses the file."""
    return witness.Witness(store if isinstance(store, dist.FileStore) else store.clone(), rank)


def store_of_groups() -> dist.Store:
    """Where the ranks of this process's groups leave each other notes: the store they met in, or torch's default one."""
    return _world.store if _world is not None else dist.distributed_c10d._get_default_store()


# -- who is missing? ----------------------------------------------------------------------------------------------------------


def explain_failure(error: BaseException, what: str, sequence: int) -> RankError:
    """Turn a failed collective into one sentence that names the rank at fault, by asking the store who else failed.

    Every rank whose collective fails writes what it was doing. A rank that wrote nothing within a short grace has said farewell, died
    (its process is gone), or is somewhere else (it never came to this collective).
    """
    world = _world
    if world is None:
        return RankError(f"{what} failed: {first_line(error)}")
    places = source.places_of(sys._getframe(1))
    details = filter(None, (f"collective number {sequence} of rank {world.rank}" if sequence >= 0 else "", source.tell(places)))
    here = f"{what} ({' at '.join(details)})"
    try:
        mine = {"what": what, "sequence": sequence, "at": source.tell(places)}
        found = _within(world.timeout + 2 * GRACE, lambda: _ask_around(world, mine))
    except Exception:                                     # the store died with the rank that held it, or a cable was pulled
        return RankError(f"{here} failed, and the store in which the others would say why is gone too "
                         f"({first_line(error)}); was the command that started the ranks, or rank 0, stopped?")
    if found.gone:
        told = "; ".join(f"{name_ranks([rank for rank in found.gone if found.gone[rank] == words])} {words}"
                         for words in dict.fromkeys(found.gone.values()))
        why = _why([rank for rank, words in found.gone.items() if not words.startswith("raised")], places, {})
        return RankError(f"{told} and never came to {here}{why}; every rank must call the same collectives")
    if found.dead:
        return RankError(f"{name_ranks(found.dead)} died while {here} was waiting; look at the last output of that rank")
    if found.silent:
        return RankError(f"{name_ranks(found.silent)} never arrived at {here} within {world.timeout:g} s{_whereabouts(found.astray)}"
                         f"{_why(found.silent, places, found.astray)}; every rank must call the same collectives in the same order")
    elsewhere = {rank: report for rank, report in found.others.items() if report["what"] != what}
    if elsewhere:
        reports = {world.rank: mine, **elsewhere}
        told = ", ".join(f"rank {rank} was in {report['what']}{' at ' if report['at'] else ''}{report['at']}"
                         for rank, report in sorted(reports.items()))
        return RankError(f"the ranks disagree: {told}; every rank must call the same collectives in the same order")
    return RankError(f"{here} failed on every rank: {first_line(error)}")


@dataclass
class _Others:
    """What is known of the other ranks after a failed collective."""

    silent: set[int]                                      # those that do not answer: gone, dead or somewhere else
    gone: dict[int, str]                                  # of those: the words with which they left
    dead: list[int]                                       # of those: their process is gone without a word
    astray: dict[int, list[source.Place]]                 # of those: where they are
    others: dict[int, dict]                               # what the rest was doing


def _ask_around(world: World, mine: dict) -> _Others:
    """Tell the others of this failure, and hear from them."""
    world.store.set(f"fault/{world.rank}", json.dumps(mine))
    silent = _await_reports(world)
    gone = {rank: words for rank in silent if (words := farewell.of(world.store, rank))}
    dead = sorted(rank for rank in silent - gone.keys() if not _is_alive(world, rank))
    astray = witness.ask(world.store, silent - set(dead)) if not dead and not gone else {}
    return _Others(silent, gone, dead, astray, _reports(world, set(range(world.size)) - silent - {world.rank}))


def _within(limit: float, work: Callable[[], T]) -> T:
    """`work()` in a thread that is given up after `limit` seconds: torch's store may wait for a lost machine as long as TCP does."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="fsdp-ref-ask", daemon=True).start()
    return future.result(limit)


def _whereabouts(astray: dict[int, list[source.Place]]) -> str:
    """`; rank 1 is at line 5 of train.py`, for each rank that answered."""
    told = ""
    for rank, places in sorted(astray.items()):
        loop = source.loop_around(places[0]) if places else None
        place = f"at {source.tell(places)}" if places else "outside of the program"
        told += f"; rank {rank} is {place}{f', in the loop {loop}' if loop else ''}"
    return told


def _why(ranks: Iterable[int], here: list[source.Place], astray: dict[int, list[source.Place]]) -> str:
    """Which statement of the program may have led these ranks away from this line."""
    by_place: dict[tuple[source.Place, ...], list[int]] = {}
    for rank in sorted(ranks):
        by_place.setdefault(tuple(astray.get(rank, ())), []).append(rank)
    told = [source.why(here, list(places), name_ranks(those)) for places, those in by_place.items()]
    return "".join(f" ({words})" for words in told if words)


def _await_reports(world: World) -> set[int]:
    """Ranks that have not reported a failure when the grace is over."""
    silent = set(range(world.size)) - {world.rank}
    deadline = time.monotonic() + GRACE
    while silent and time.monotonic() < deadline:
        silent = {rank for rank in silent if not world.store.check([f"fault/{rank}"])}
        if silent and all(farewell.of(world.store, rank) or not _is_alive(world, rank) for rank in silent):
            break
        time.sleep(0.05)
    return silent


def _reports(world: World, ranks: set[int]) -> dict[int, dict]:
    return {rank: json.loads(world.store.get(f"fault/{rank}")) for rank in ranks}


def _is_alive(world: World, rank: int) -> bool:
    """False when the rank's process on this machine is gone or a zombie. A rank on another machine counts as alive."""
    try:
        card = json.loads(world.store.get(f"rank/{rank}"))
        return card["host"] != socket.gethostname() or psutil.Process(card["pid"]).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- ranks never outlive their parent -----------------------------------------------------------------------------------------


def die_with_parent(parent: int | None = None, poll: float = 0.5) -> None:
    """Start a thread that ends this process, at once and whatever it is doing, when `parent` (default: the process that started
    this one) is gone. Polling works on Linux and macOS, and also where signals are ignored."""

    def watch() -> None:
        try:
            while watched.is_running() and watched.status() != psutil.STATUS_ZOMBIE:
                time.sleep(poll)
        except psutil.NoSuchProcess:
            pass
        os._exit(1)

    try:
        watched = psutil.Process(os.getppid() if parent is None else parent)
    except psutil.NoSuchProcess:                          # it was gone before we looked
        os._exit(1)
    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()
    if sys.platform == "linux" and watched.pid == os.getppid():
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)         # reaches a stopped process too, where no thread runs
