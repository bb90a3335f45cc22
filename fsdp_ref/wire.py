"""The CPU's wire: one thread a process group that carries one message after the other, as a GPU's communication stream does.

Two things happen here. Messages travel *directly*: every rank sends each other rank just what that rank needs. And a slow network can
be *emulated*. collectives.py is the only caller. This module must never decide what is sent, and never run on CUDA tensors.

[Note: why not gloo's own collectives] gloo's reduce-scatter is an all-reduce of a copy, so it moves twice the bytes it has to, and its sums
run round a ring whose starting point depends on the size of the buffer. Sent directly, a message of P bytes costs (n-1)/n P, as the
formulas say, and every sum is r0 + r1 + r2 + ... in rank order, wherever the number stands: DDP, ZeRO-1, ZeRO-2 and ZeRO-3 make the same
bits. Measured for 12.6 MB: all-gather 11.2 -> 5.6 ms and reduce-scatter 18.8 -> 9.2 ms on 2 ranks, 20 -> 13 ms and 42 -> 17 ms on 4.
With two ranks the bits are gloo's too (a + b is b + a).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .errors import ConfigError


@dataclass(frozen=True)
class Link:
    """A modelled network: `bandwidth` in bytes a second, `latency` in seconds a message."""

    bandwidth: float
    latency: float

    def seconds(self, wire_bytes: float) -> float:
        """How long the link is busy with a collective in which each rank sends `wire_bytes` (alpha-beta model)."""
        return self.latency + wire_bytes / self.bandwidth


_link: Link | None = None
_wires: weakref.WeakKeyDictionary[dist.ProcessGroup, Wire] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def emulate(bandwidth: float, latency: float = 0.0) -> Iterator[Link]:
    """Slow every collective on the CPU down to a link of `bandwidth` bytes/s and `latency` s, without using the CPU meanwhile.

    A collective in which each rank sends b bytes keeps the link for at least `latency + b / bandwidth`; those of one group queue behind
    each other. What overlaps with compute is then hidden, as on a real network. Every rank must enter it. Has no effect on CUDA.

    Raises:
        ConfigError: a bandwidth that is not positive, or a negative latency.
    """
    global _link
    if not bandwidth > 0 or not latency >= 0:
        raise ConfigError(f"a link of {bandwidth} bytes/s with a latency of {latency} s cannot exist; give a positive bandwidth in bytes "
                          "a second and a latency of 0 or more seconds")
    before, _link = _link, Link(float(bandwidth), float(latency))
    try:
        yield _link
    finally:
        _link = before


class Wire:
    """The thread of one process group. Jobs run in the order they were given; after one has failed, the others fail with it
    (unless it failed before anything was sent, RankError.sent)."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=_carry_all, args=(self._jobs,), name="fsdp-ref-wire", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    @staticmethod
    def of(group: dist.ProcessGroup) -> Wire:
        """The wire of `group`, started when it is first needed."""
        if group not in _wires:
            _wires[group] = Wire()
        return _wires[group]

    def submit(self, carry: Callable[[], object], wire_bytes: float, done: Callable[[float, float], object]) -> Future:
        """Queue a message. `carry()` returns when it has arrived; then `done(began, ended)` is told when the link had it."""
        future: Future = Future()
        self._jobs.put((future, carry, wire_bytes, done))
        return future


def _carry_all(jobs: queue.SimpleQueue) -> None:
    """What the thread does. It keeps the words of a failure, not the exception: that would hold the frames it passed through."""
    failure = ""
    while (job := jobs.get()) is not None:
        future, *rest = job
        problem: BaseException | None = RuntimeError(f"an earlier message of this group failed: {failure}") if failure else None
        if problem is None:
            try:
                _carry(*rest)
            except BaseException as error:
                problem, failure = error, str(error) if getattr(error, "sent", True) else ""
        del job, rest                                       # the buffers belong to whoever waits, from the moment that they may be used
        if problem is None:
            future.set_result(None)
        else:
            future.set_exception(problem)
        del future, problem


def _carry(carry: Callable[[], object], wire_bytes: float, done: Callable[[float, float], object]) -> None:
    began, link = time.perf_counter(), _link
    with torch.inference_mode():                            # also writes to tensors that were made in inference mode
        carry()
    hold(link, began, wire_bytes)
    done(began, time.perf_counter())


def hold(link: Link | None, began: float, wire_bytes: float) -> None:
    """Return when `link` is done with a message that began at `began` (perf_counter); at once where none is emulated."""
    if link is not None:
        time.sleep(max(0.0, began + link.seconds(wire_bytes) - time.perf_counter()))


def link() -> Link | None:
    """The link that is emulated now."""
    return _link


# -- messages -----------------------------------------------------------------------------------------------------------------


def all_gather(output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, tag: int) -> None:
    """Send `shard` to everyone, receive everyone's into the rows of `output`, shape (n, len)."""
    rank, size = group.rank(), group.size()
    works = []
    for step in range(1, size):                             # to the next rank first, to the one after it second, ...
        works += _send(shard, (rank + step) % size, group, tag)
        works += _receive(output[(rank - step) % size], (rank - step) % size, group, tag)
    if output[rank].data_ptr() != shard.data_ptr():
        output[rank].copy_(shard)
    for work in works:
        work.wait()


def reduce_scatter(output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup, tag: int, mean: bool) -> None:
    """Send row r of `source` (n, len) to rank r; `output` (len,) becomes the sum of what came, in rank order, or its mean.

    `output` may be this rank's own row of `source`.
    """
    rank, size = group.rank(), group.size()
    sends, incoming, arrivals = [], [source[rank]] * size, [[]] * size
    for step in range(1, size):
        to, origin = (rank + step) % size, (rank - step) % size
        sends += _send(source[to], to, group, tag)
        incoming[origin] = torch.empty_like(source[origin])
        arrivals[origin] = _receive(incoming[origin], origin, group, tag)
    total = incoming[0]
    for origin in range(size):
        for work in arrivals[origin]:
            work.wait()
        if origin:
            total = torch.add(total, incoming[origin], out=output if origin >= rank else None)
    if mean:
        torch.div(total, size, out=output)
    elif total is not output:
        output.copy_(total)
    for work in sends:
        work.wait()


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, tag: int, mean: bool) -> None:
    """`tensor` (1-D) becomes the sum or mean over the ranks: a reduce-scatter, then an all-gather of the pieces."""
    rank, size = group.rank(), group.size()
    width = -(-tensor.numel() // size)
    rows = tensor if width * size == tensor.numel() else tensor.new_zeros(width * size)
    if rows is not tensor:
        rows[: tensor.numel()].copy_(tensor)
    grid = rows.view(size, width)
    reduce_scatter(grid[rank], grid, group, tag, mean)
    all_gather(grid, grid[rank], group, tag)
    if rows is not tensor:
        tensor.copy_(rows[: tensor.numel()])


def _send(tensor: torch.Tensor, rank: int, group: dist.ProcessGroup, tag: int) -> list[dist.Work]:
    return [group.send([tensor.view(torch.uint8)], rank, tag)] if tensor.numel() else []


def _receive(tensor: torch.Tensor, rank: int, group: dist.ProcessGroup, tag: int) -> list[dist.Work]:
    return [group.recv([tensor.view(torch.uint8)], rank, tag)] if tensor.numel() else []
