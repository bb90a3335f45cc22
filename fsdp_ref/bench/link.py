"""How much communication hides under compute on a slow link: ZeRO-3 with prefetch off, 1 and 2, on an emulated network.

On one machine a gather is a copy in memory and over before it could hide. So every collective is slowed to a modelled link
(`collectives.emulate`, CPU only) whose speed is chosen from what this machine computes: gathering one block takes `ratio` times as long
as one block's forward. Everything is read from the ledger. This module must never compare.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from typing import Any

from .. import collectives, ledger
from ..errors import ConfigError
from ..ledger import Lane
from ..world import World
from .contenders import Shape, prefetching_step
from .speed import order, timed

AHEAD = ("0", "1", "2")         # units gathered ahead; keys of the result
LATENCY = 100e-6                # seconds before the first byte of a collective arrives
WARM_UP = 2                     # steps that are not kept, of each
COLLECTIVES = (Lane.ALL_GATHER, Lane.REDUCE_SCATTER, Lane.ALL_REDUCE)


def measure(here: World, shape: Shape, ratio: float, rounds: int) -> dict[str, Any]:
    """Times of all ranks, raw.

    Returns:
        dict with `block` (see `calibrate`), `link` (bandwidth in bytes/s, latency in s), `bare` (seconds of a step without the slow link,
        a list a rank) and `slow`: for each of "0", "1", "2" a list of rounds, each a list of ranks, each what `observe` returns.
    """
    steps = {ahead: prefetching_step(int(ahead), shape, here.device) for ahead in AHEAD}
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    gc.freeze()
    block, bare = calibrate(here, steps["0"], rounds)
    link = {"bandwidth": bandwidth(block["wire_bytes"], ratio * block["forward_seconds"], LATENCY), "latency": LATENCY}
    slow: dict[str, list] = {ahead: [] for ahead in AHEAD}
    with collectives.emulate(**link):
        for turn in range(1 + rounds):                                 # the first round meets the link for the first time
            for ahead in order(AHEAD, turn):
                seen = observe(here, steps[ahead])
                if turn:
                    slow[ahead].append(seen)
    everyone = collectives.gather_json(slow)
    return {"block": block, "link": link, "bare": collectives.gather_json(bare),
            "slow": {ahead: [[rank[ahead][i] for rank in everyone] for i in range(rounds)] for ahead in AHEAD}}


def calibrate(here: World, step: Callable[[], None], rounds: int) -> tuple[dict[str, float], list[float]]:
    """What one block costs on this machine, the same on every rank; and this rank's seconds of a step.

    Returns:
        `forward_seconds` (median over blocks, rounds and ranks, without a gather in flight beside it), `gathered_bytes` (the whole block)
        and `wire_bytes` (what a rank sends of it with a ring).
    """
    forwards, gathers, seconds = [], [], []
    for _ in range(rounds):
        with ledger.record() as book:
            seconds.append(timed(step, here.device))
        blocks = [event for event in book.events if event.unit.startswith("blocks.") and event.phase == "forward"]
        forwards += [event.seconds for event in blocks if event.lane == Lane.COMPUTE]
        gathers += [event for event in blocks if event.lane == Lane.ALL_GATHER]
    forward = statistics.median(value for rank in collectives.gather_json(forwards) for value in rank)
    return {"forward_seconds": forward, "gathered_bytes": gathers[0].bytes, "wire_bytes": gathers[0].wire_bytes}, seconds


def bandwidth(nbytes: float, seconds: float, latency: float) -> float:
    """Bytes a second of the link that takes `seconds`, `latency` included, for `nbytes`.

    12e6 bytes in 31 ms with 1 ms of latency -> 400e6 bytes/s.
    """
    if seconds <= latency:
        raise ConfigError(f"a block's gather would have to take {seconds * 1e3:.3g} ms and the emulated link's latency alone is "
                          f"{latency * 1e3:.3g} ms; choose a larger --dim, --batch or --link-ratio")
    return nbytes / (seconds - latency)


def observe(here: World, step: Callable[[], None]) -> dict[str, Any]:
    """One recorded step of this rank: its `seconds`, when the link was `busy`, and when the rank was `waiting` for a collective.

    Stretches are (start, end) in seconds, those of waiting with the collective's name. `gathers` are the seconds each block's forward
    gather kept the link.
    """
    with ledger.record() as book:
        seconds = timed(step, here.device)
    own = [event for event in book.events if event.phase in ("forward", "backward")]       # not the barrier before the step
    sent = [event for event in own if event.lane in COLLECTIVES]
    gathers = [event for event in sent if event.lane == Lane.ALL_GATHER and event.phase == "forward" and event.unit.startswith("blocks.")]
    return {"seconds": seconds, "busy": [(event.on_wire, event.end) for event in sent],
            "waiting": [(event.start, event.end, event.name) for event in own if event.lane == Lane.WAIT],
            "gathers": [event.end - event.on_wire for event in gathers]}
