"""When a training run saves, and what its saves cost.

With `--save-every N` every N steps. With `--save-every auto` the first save comes after a few steps, to learn what one costs; from then
on the interval is the one that wastes least at the failure rate `--mtbf` (interval.py). The ranks measure each for itself and
agree on the slowest, so that all save after the same step. This module must never let two ranks decide differently, nor write a step
twice.
"""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from . import checkpoint, collectives, interval
from .train_options import as_dict
from .train_step import Learner

FIRST_SAVE = 5              # steps after the start until the first save of --save-every auto


class Saver:
    """The checkpoints of one run, and their account.

    Attributes:
        newest: the step of the newest checkpoint in the run's folder; None when it has none that counts.
        stalls: seconds that training stood still for each save of this start.
        every: steps between two saves; 0 for none.
    """

    def __init__(self, learner: Learner, home: Path) -> None:
        self.learner, self.options, self.home = learner, learner.options, home
        self.every = FIRST_SAVE if self.options.save_every == "auto" else self.options.save_every
        self.newest: int | None = None
        self.stalls: list[float] = []
        self.on_its_way: checkpoint.AsyncSave | None = None
        self.unreported = self.restart = 0.0

    def begin(self) -> None:
        """Training starts now: what came before is what a restart costs."""
        self.first, self.began = self.learner.step, time.perf_counter()
        self.restart = time.time() - psutil.Process().create_time()

    def due(self) -> bool:
        """Whether the run saves after the step that is done; the same on every rank."""
        step = self.learner.step
        if not self.every:
            return False
        if self.options.save_every == "auto":
            return step == self.options.steps or step - max(self.first, self.newest or 0) >= self.every
        return step == self.options.steps or step % self.every == 0

    def save(self, unfinished: dict | None = None) -> None:
        """A checkpoint of this step, with what it takes to make the next steps the same: weights, moments, position, random state.

        `unfinished`: the step's line for the log, when a signal came before its held-out loss was known. Does nothing when the newest
        checkpoint is of this very step.

        Raises:
            CheckpointError: it could not be written, or the one before in the background could not; the older ones are untouched.
        """
        learner = self.learner
        if self.newest == learner.step:
            return
        about = {name: value for name, value in as_dict(self.options).items() if name not in ("out", "data")}     # no paths of this machine
        began = time.perf_counter()
        save = checkpoint.async_save if self.options.async_save else checkpoint.save
        saved = save(self.home, step=learner.step, model=learner.model, optimizer=learner.optimizer, loader=learner.loader,
                     extra={"options": about, "unfinished": unfinished}, keep_last=self.options.keep_last or None)
        self.on_its_way = saved if self.options.async_save else None
        self.stalls.append(time.perf_counter() - began)
        self.unreported += self.stalls[-1]
        self.newest = learner.step
        if self.options.save_every == "auto":
            self.every = self.agree_on_interval()

    def finish(self) -> None:
        """Wait on this rank for the save in the background, if there is one.

        Raises:
            CheckpointError: it failed; the older checkpoints are untouched.
        """
        if self.on_its_way is not None:
            self.on_its_way.wait()

    def take_stall(self) -> float:
        """Seconds of saving since this was last asked: what the log's next line reports."""
        stall, self.unreported = self.unreported, 0.0
        return stall

    def agree_on_interval(self) -> int:
        """Steps between two saves, from the slowest rank's measurements; a collective."""
        everyone = collectives.gather_json([self.mean_stall(), self.step_seconds()])
        stall, step = (max(values) for values in zip(*everyone, strict=True))
        return interval.advise(stall, step, self.options.mtbf).steps

    def mean_stall(self) -> float:
        return sum(self.stalls) / len(self.stalls)

    def step_seconds(self) -> float:
        """Seconds a step of this start has taken, evaluations included and saves left out."""
        steps = max(1, self.learner.step - self.first)
        return max(1e-9, (time.perf_counter() - self.began - sum(self.stalls)) / steps)

    def summary(self) -> list[str]:
        """What the saves of this start cost, and what --mtbf advises; lines to print."""
        if not self.stalls:
            return []
        count, total = len(self.stalls), sum(self.stalls)
        share = total / max(1e-9, time.perf_counter() - self.began)
        lines = [f"saved {count} {'time' if count == 1 else 'times'}: training stood still for {total:.2f} s in all, "
                 f"{self.mean_stall():.2f} s each, {100 * share:.1f} % of the time"]
        if self.options.mtbf is not None:
            best = interval.advise(self.mean_stall(), self.step_seconds(), self.options.mtbf, self.restart)
            lines.append(f"with a failure every {spell(self.options.mtbf)}, saving every {best.steps} steps ({spell(best.seconds)}) wastes "
                         f"least: {100 * best.waste:.2g} % of the time goes into saves, lost work and restarts; a failure costs about "
                         f"{spell(best.lost)} of work and {spell(best.restart)} until training goes on")
        return lines


def spell(seconds: float) -> str:
    """A time in the unit that suits it.

    >>> spell(6.3), spell(365), spell(3 * 3600), spell(2 * 86400)
    ('6.3 s', '6.1 min', '3 h', '2 days')
    """
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{round(seconds / size, 1):g} {unit}"
    return f"{seconds:.2g} s"
