"""Young's and Daly's formulas: the worked figures, the optimum found by search, and a simulation of failures as an oracle."""

import doctest
import math
import random

import pytest

from fsdp_ref import interval
from fsdp_ref.errors import ConfigError

HOURS = 3600.0


def test_the_worked_figures():
    """One failure in three hours (Llama 3 405B on 16,384 GPUs); stalls of asynchronous and synchronous saves of a 7B model."""
    assert interval.young(6.3, 3 * HOURS) == pytest.approx(math.sqrt(2 * 6.3 * 10800))
    assert interval.young(6.3, 3 * HOURS) / 60 == pytest.approx(6, abs=0.2)
    assert interval.young(148.8, 3 * HOURS) / 60 == pytest.approx(30, abs=0.2)
    assert doctest.testmod(interval).failed == 0


@pytest.mark.parametrize(("stall", "mtbf"), [(6.3, 3 * HOURS), (148.8, 3 * HOURS), (0.1, 60.0), (20.0, 60.0)])
def test_dalys_interval_wastes_least(stall, mtbf):
    best = interval.daly(stall, mtbf)
    least = min(interval.waste(best * factor / 100, stall, mtbf) for factor in range(20, 500))
    assert interval.waste(best, stall, mtbf) == pytest.approx(least, abs=5e-4)
    assert best < interval.young(stall, mtbf)
    short = 1e-6 * mtbf
    assert interval.daly(short, mtbf) == pytest.approx(interval.young(short, mtbf), rel=2e-3)
    assert interval.daly(3 * mtbf, mtbf) == mtbf


@pytest.mark.parametrize(("every", "stall", "mtbf", "restart"), [(360.0, 6.3, 3 * HOURS, 60.0), (50.0, 20.0, 60.0, 5.0)])
def test_waste_and_lost_work_against_a_simulation(every, stall, mtbf, restart):
    """Failures at random moments, also during saves and restarts; work since the last checkpoint is done again."""
    rng, clock, done, lost = random.Random(1), 0.0, 0, []
    while done < 20_000:
        failure = rng.expovariate(1 / mtbf)
        whole = int(failure // (every + stall))              # segments until it comes
        done += whole
        clock += failure
        lost.append(failure - whole * (every + stall))
        while (again := rng.expovariate(1 / mtbf)) < restart:
            clock += again                                   # a failure during the restart: begin it again
        clock += restart
    assert interval.waste(every, stall, mtbf, restart) == pytest.approx(1 - done * every / clock, abs=0.01)
    assert interval.lost_work(every, stall, mtbf) == pytest.approx(sum(lost) / len(lost), rel=0.05)


def test_advice_is_in_whole_steps():
    advice = interval.advise(stall=6.3, step=1.5, mtbf=3 * HOURS, restart=60.0)
    assert advice.steps == 243 and advice.seconds == 364.5
    assert advice.waste == interval.waste(364.5, 6.3, 3 * HOURS, 60.0) and advice.lost == interval.lost_work(364.5, 6.3, 3 * HOURS)
    assert interval.advise(stall=0.001, step=100.0, mtbf=60.0).steps == 1
    assert interval.waste(1e6, 1.0, 1.0) == 1.0 and interval.lost_work(1e6, 1.0, 1.0) == 1.0


@pytest.mark.parametrize("call", [lambda: interval.young(0.0, 1.0), lambda: interval.daly(1.0, -1.0), lambda: interval.waste(0.0, 1.0, 1.0),
                                  lambda: interval.waste(1.0, -1.0, 1.0), lambda: interval.lost_work(1.0, 1.0, math.inf),
                                  lambda: interval.advise(1.0, math.nan, 1.0), lambda: interval.advise(1.0, 1.0, 1.0, -1.0)])
def test_times_that_cannot_be_are_named(call):
    with pytest.raises(ConfigError, match="number of seconds|more seconds"):
        call()
