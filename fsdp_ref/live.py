"""What a rank tells about itself while it trains: a small file a rank, written now and then, that a notebook reads meanwhile.

    reporter = live.Reporter(folder)                         # on every rank
    for step in range(steps):
        with reporter.step() as note:
            note.loss = train_step()

Each file, FOLDER/rank-00003.json, holds the last losses, the bytes on the books by category, and the ledger of the last step that was
recorded. Writing and recording are paid for from a budget: after something that cost c seconds nothing more is done for c / budget seconds,
so at the default budget of 0.01 a run is slowed by 1 % in the long run (its first seconds by more). Which step is recorded is decided by
each rank for itself; no collective is started. This module must never wait for a reader or for another rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import ledger, textfile
from .errors import FsdpRefError
from .ledger import Ledger
from .rows import Category

FORMAT = "fsdp_ref live 1"
LOSSES = 500            # that a file keeps
LARGEST = 64 << 20      # bytes of a file that is read


@dataclass
class Note:
    """What a step has to say."""

    loss: float | None = None


@dataclass
class Status:
    """One rank's file, read."""

    rank: int
    step: int
    losses: dict[int, float]
    held: dict[str, int]
    recorded: Ledger | None = None
    recorded_step: int = -1


@dataclass
class Reporter:
    """See the module docstring. `folder` is made if need be; files of an earlier run in it are replaced when the ranks report."""

    folder: str | os.PathLike
    budget: float = 0.01
    first: int = 2          # the step from which on one is recorded: by the third the optimizer's state exists
    _count: int = 0
    _quiet_until: float = 0.0
    _losses: deque = field(default_factory=lambda: deque(maxlen=LOSSES))
    _recorded: tuple[int, Ledger] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.budget < 1:
            raise FsdpRefError(f"the budget {self.budget} is no share of the time; give a number between 0 and 1, such as 0.02")
        Path(self.folder).mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def step(self) -> Iterator[Note]:
        """One training step; it is recorded and told when the budget allows."""
        note, due, spent = Note(), time.perf_counter() >= self._quiet_until, 0.0
        if due and self._count >= self.first and not ledger.active():
            before = time.perf_counter()
            with ledger.record() as rows:
                spent += time.perf_counter() - before                              # collecting garbage and opening the books
                yield note
                before = time.perf_counter()
            spent += time.perf_counter() - before
            self._recorded = self._count, rows
        else:
            yield note
        if note.loss is not None:
            self._losses.append((self._count, float(note.loss)))
        self._count += 1
        if due:
            before = time.perf_counter()
            self.tell()
            now = time.perf_counter()
            self._quiet_until = now + (spent + now - before) / self.budget

    def tell(self) -> Path:
        """Write this rank's file now, whole or not at all."""
        held = {str(category): nbytes for category in Category if (nbytes := ledger.live_bytes(category))}
        data = {"format": FORMAT, "rank": ledger.rank(), "step": self._count, "losses": list(self._losses), "held": held}
        if self._recorded is not None:
            data["recorded"] = [self._recorded[0], self._recorded[1].to_json()]
        return textfile.write(Path(self.folder) / f"rank-{ledger.rank():05d}.json", json.dumps(data), "the live report")


def read(folder: str | os.PathLike) -> list[Status]:
    """What the ranks last told, by rank; empty when none has yet.

    Raises:
        FsdpRefError: a file is no report of a rank.
    """
    found = []
    for path in sorted(Path(folder).glob("rank-*.json")):
        try:
            if path.stat().st_size > LARGEST:
                raise ValueError("it is too large")
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise ValueError(f"its format is {data['format']!r}")
            step, rows = data.get("recorded") or (-1, None)
            found.append(Status(int(data["rank"]), int(data["step"]), {int(s): float(v) for s, v in data["losses"]},
                                {str(k): int(v) for k, v in data["held"].items()}, None if rows is None else Ledger.from_json(rows),
                                int(step)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FsdpRefError(f"{path} is no live report of a rank ({error}); remove it, or give another folder") from error
    return found


def last_step(statuses: list[Status]) -> Ledger | None:
    """The recorded steps of the ranks as one ledger: of the newest step that the most ranks recorded; None before there is one."""
    steps = [status.recorded_step for status in statuses if status.recorded is not None]
    if not steps:
        return None
    chosen = max(set(steps), key=lambda step: (steps.count(step), step))
    merged = Ledger.merge([s.recorded for s in statuses if s.recorded is not None and s.recorded_step == chosen])
    merged.meta |= {"step": chosen, "world_size": len(statuses)}
    return merged
