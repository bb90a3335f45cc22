"""How long a step takes: contenders take turns inside the same ranks, so that what slows one slows all.

A round is one step of each. The order changes from round to round (it moves on by one, and runs backwards every other time), so nobody
always goes first or always follows the same one. This module must never compare; figures.py does that.
"""

from __future__ import annotations

import contextlib
import gc
import time

import torch

from .. import collectives, ledger
from ..world import World
from .contenders import RECORDING, Shape, step_of

WARM_UP = 2        # rounds that are not kept: the first makes optimizer state and buffers, the second is the first one of its kind


def measure(here: World, keys: tuple[str, ...], shape: Shape, rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender's step in each of `rounds` rounds: of the slowest rank, which is when the step is over."""
    steps = {key: step_of(key, shape, here.device) for key in keys if key != RECORDING}
    if RECORDING in keys:                              # the same model: recording is then the only difference between the two
        steps[RECORDING] = steps["zero3"] if "zero3" in steps else step_of(RECORDING, shape, here.device)
    times: dict[str, list[float]] = {key: [] for key in keys}
    gc.freeze()                                        # what lives now lives to the end; a collection need not look at it again
    for turn in range(WARM_UP + rounds):
        for key in order(keys, turn):
            with ledger.record() if key == RECORDING else contextlib.nullcontext():
                seconds = timed(steps[key], here.device)
            if turn >= WARM_UP:
                times[key].append(seconds)
    return slowest(collectives.gather_json(times))


def order(keys: tuple[str, ...], turn: int) -> tuple[str, ...]:
    """(a b c) in turns 0, 1, 2, ...: abc, cba, bca, acb, cab, bac, and again."""
    start = turn // 2 % len(keys)
    moved = keys[start:] + keys[:start]
    return moved[::-1] if turn % 2 else moved


def timed(step, device: torch.device) -> float:
    """Seconds of one call of `step` on this rank. All ranks begin together, with nothing left to collect."""
    gc.collect()
    collectives.barrier()
    begin = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def slowest(ranks: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """The largest of all ranks' seconds, round by round."""
    return {key: [max(column) for column in zip(*(rank[key] for rank in ranks), strict=True)] for key in ranks[0]}
