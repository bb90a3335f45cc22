"""Worlds of up to eight ranks without eight processes: each rank is a thread, and every tensor of its model is one shard of the whole.

Real are save, load and everything between: each thread runs the same code as a rank and meets the others where ranks meet. Replaced are
the three places where that code asks for ranks: who am I and how many are we (`votes`), the exchange of small facts
(`collectives.gather_json`), and which part of a tensor lies here (`LocalTensor.of`), where a DTensor would say it. A model in a thread
holds whole tensors of which only the thread's own box counts, so a byte that lands outside of the box is seen.
"""

from __future__ import annotations

import contextlib
import json
import threading
from dataclasses import replace
from unittest import mock

from fsdp_ref import collectives
from fsdp_ref.checkpoint import votes
from fsdp_ref.checkpoint.state import LocalTensor

TIMEOUT = 30            # seconds that a thread waits for the others

_here = threading.local()
_of = LocalTensor.of


class World:
    """`size` ranks that cut every tensor along dimension `dimension` (None: every rank has it all)."""

    def __init__(self, size: int, dimension: int | None) -> None:
        self.size, self.dimension = size, dimension
        self.meeting = threading.Barrier(size)
        self.slots = [None] * size

    def run(self, work) -> list:
        """`work(rank)` in each thread; the results in rank order, or the first error."""
        results, errors = [None] * self.size, []

        def one(rank: int) -> None:
            _here.world, _here.rank = self, rank
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors.append(error)
                self.meeting.abort()

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.size)]
        with installed():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(2 * TIMEOUT)
        if errors:
            raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
        return results

    def gather(self, value) -> list:
        """What `collectives.gather_json` does."""
        self.slots[_here.rank] = json.dumps(value)
        self.meeting.wait(TIMEOUT)
        everyone = [json.loads(text) for text in self.slots]
        self.meeting.wait(TIMEOUT)
        return everyone


def box_of(shape: tuple[int, ...], local: LocalTensor, world: World, rank: int) -> LocalTensor:
    """This rank's shard of a whole tensor."""
    if world.dimension is None or not shape:
        return local
    box = local.box.cut(world.dimension % len(shape), world.size, rank)
    return replace(local, part=local.slice(box), box=box, replicas=1, replica=0)


def _shard(name, tensor) -> LocalTensor:
    local = _of(name, tensor)
    return box_of(local.shape, local, _here.world, _here.rank)


@contextlib.contextmanager
def installed():
    """The three replacements, while threads run."""
    with mock.patch.object(votes, "rank", lambda: _here.rank), mock.patch.object(votes, "world_size", lambda: _here.world.size), \
            mock.patch.object(collectives, "gather_json", lambda value, *_, **__: _here.world.gather(value)), \
            mock.patch.object(LocalTensor, "of", staticmethod(_shard)):
        yield
