"""How often to save: the interval at which saving and losing work together waste least.

Saving often costs stalls; saving seldom costs lost work when a machine fails. All times are in seconds: `stall` (δ), how long
training stands still for one checkpoint; `mtbf` (M), mean time between failures of the *whole* job (of 1,000 machines that fail once
in 1,000 days each: one day); `interval` (τ), training time between two checkpoints; `restart` (R), from a failure until training goes
on. Failures are assumed to come at random with a constant rate. Pure arithmetic: this module must never measure, save or import torch.

Sources: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974. J. T. Daly, A higher order
estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3), 2006.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import ConfigError


def young(stall: float, mtbf: float) -> float:
    """The interval τ = sqrt(2 δ M), where the two first-order costs δ/τ (saving) and τ/2M (lost work) are equal.

    >>> round(young(6.3, 3 * 3600) / 60, 1), round(young(148.8, 3 * 3600) / 60, 1)      # minutes
    (6.1, 29.9)
    """
    _check(stall=stall, mtbf=mtbf)
    return math.sqrt(2 * stall * mtbf)


def daly(stall: float, mtbf: float) -> float:
    """Daly's estimate of the best interval, good also where a stall is no longer small beside the time between failures (his equation 37).

    τ = sqrt(2 δ M) (1 + sqrt(δ / 2M) / 3 + (δ / 2M) / 9) - δ  where δ < 2M, else τ = M.

    >>> round(daly(6.3, 3 * 3600)), round(daly(148.8, 3 * 3600))
    (365, 1695)
    """
    _check(stall=stall, mtbf=mtbf)
    if stall >= 2 * mtbf:
        return mtbf
    ratio = stall / (2 * mtbf)
    return math.sqrt(2 * stall * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


def waste(interval: float, stall: float, mtbf: float, restart: float = 0.0) -> float:
    """The share of the time that is not training, 0 to 1, at this interval: saving, work done twice, restarts.

    From Daly's complete model: training that takes T_s takes T_w = M e^(R/M) (e^((τ+δ)/M) - 1) T_s / τ with failures; this is
    1 - T_s / T_w.

    >>> round(100 * waste(365, 6.3, 3 * 3600), 1), round(100 * waste(3600, 6.3, 3 * 3600), 1)      # per cent
    (3.4, 15.9)
    """
    _check(interval=interval, mtbf=mtbf)
    _check_not_negative(stall=stall, restart=restart)
    try:
        return 1 - interval / (mtbf * math.exp(restart / mtbf) * math.expm1((interval + stall) / mtbf))
    except OverflowError:                                   # hardly any interval is ever finished
        return 1.0


def lost_work(interval: float, stall: float, mtbf: float) -> float:
    """Seconds of work that one failure costs on average: the mean time since the last checkpoint when it comes.

    M - (τ+δ) / (e^((τ+δ)/M) - 1), the mean of an exponential time cut off at τ+δ; about half an interval where failures are rare.

    >>> round(lost_work(365, 6.3, 3 * 3600))
    185
    """
    _check(interval=interval, mtbf=mtbf)
    _check_not_negative(stall=stall)
    ratio = (interval + stall) / mtbf
    return mtbf * (1 - ratio / math.expm1(ratio)) if ratio < 700 else mtbf


@dataclass(frozen=True)
class Advice:
    """What to choose and what it costs.

    Attributes:
        steps, seconds: the interval, in whole steps (1 or more) and the training time that these take.
        waste: share of the time that is not training, 0 to 1.
        lost: seconds of work that a failure costs on average; `restart` comes on top.
        restart: seconds from a failure until training goes on.
    """

    steps: int
    seconds: float
    waste: float
    lost: float
    restart: float


def advise(stall: float, step: float, mtbf: float, restart: float = 0.0) -> Advice:
    """The interval that wastes least, given the seconds that a save's stall, one training step and a restart take.

    Raises:
        ConfigError: a time that is not a positive number (`restart`: a negative one).
    """
    _check(step=step)
    steps = max(1, round(daly(stall, mtbf) / step))
    seconds = steps * step
    return Advice(steps, seconds, waste(seconds, stall, mtbf, restart), lost_work(seconds, stall, mtbf), restart)


def _check(**times: float) -> None:
    for name, value in times.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name} is {value} s; it must be a positive number of seconds")


def _check_not_negative(**times: float) -> None:
    for name, value in times.items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} is {value} s; it must be 0 or more seconds")
