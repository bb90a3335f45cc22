"""Pictures with controls, for a notebook: step through a timeline, a ring, a gather; choose rank, unit, stage, world size.

Each function returns an `Explorer`: labelled ipywidgets (a slider and a list answer to Tab and the arrow keys by themselves), the picture
with its words as alt text, and the table of the same numbers. Where widgets cannot run (a page on GitHub, nbconvert, a terminal) the static
picture of the first setting, its words and its table stand there instead. This module must never compute a number of its own.

    from fsdp_ref.lab import explore
    explore.cut(ledger)          explore.ring()          explore.gather(ledger)          explore.strategies({"DDP": one, "ZeRO-3": other})
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as widgets
from IPython import get_ipython

from ..errors import ConfigError, FsdpRefError
from ..ledger import Category, Lane, Ledger
from ..viz import (
    Picture,
    held_by_stage,
    memory_by_rank,
    memory_over_step,
    shard_map,
    step_timeline,
    weight_lifetimes,
    wire_by_stage,
)
from ..viz import (
    ring as draw_ring,
)
from ..viz.cut import extent, held_at
from ..viz.units import time_unit
from . import reprs

if get_ipython() is not None:
    reprs.install(get_ipython())

STEPS = 200             # positions of the slider through time
_WIDE = widgets.Layout(width="min(45em, 95%)")
_LABEL = {"description_width": "9em"}


class Explorer:
    """Controls, and the picture that `draw(**values of the controls)` makes; drawn anew when a control moves, each setting once."""

    def __init__(self, draw: Callable[..., Picture], **controls: widgets.Widget) -> None:
        self.draw, self.controls = draw, controls
        self.image, self.table = widgets.HTML(), widgets.HTML()
        self.status = widgets.HTML()
        self._drawn: dict[tuple, Picture] = {}
        for control in controls.values():
            control.layout, control.style.description_width = _WIDE, _LABEL["description_width"]
            control.observe(self._moved, names="value")
        self.view = widgets.VBox([*controls.values(), self.status, self.image, self.table])
        self._moved()

    @property
    def values(self) -> dict[str, Any]:
        """What the controls are set to."""
        return {name: control.value for name, control in self.controls.items()}

    @property
    def picture(self) -> Picture:
        """The picture of this setting."""
        key = tuple(self.values.values())
        if key not in self._drawn:
            self._drawn[key] = self.draw(**self.values)
        return self._drawn[key]

    def _moved(self, _: object = None) -> None:
        try:
            picture = self.picture
        except FsdpRefError as error:
            self.status.value = f'<p role="alert">{html.escape(str(error))}</p>'
            return
        self.status.value = f'<p role="status" aria-live="polite">{html.escape(picture.alt)}</p>'
        self.image.value = picture.image_html
        self.table.value = picture.html

    def _repr_mimebundle_(self, include=None, exclude=None) -> tuple[dict, dict]:
        """The widgets; for a front end without them, the static picture, its words and its table."""
        data = dict(self.view._repr_mimebundle_())
        still, metadata = self.picture._repr_mimebundle_()
        return {**data, **still}, metadata


def cut(ledger: Ledger) -> Explorer:
    """Drag a cut through the time of a recording and read who holds what, and what every rank is doing.

    Raises:
        FsdpRefError: the ledger holds no allocations.
    """
    begin, end = extent(ledger)
    time = time_unit(end - begin)
    stops = [(time.text((end - begin) * i / STEPS), begin + (end - begin) * i / STEPS) for i in range(STEPS + 1)]
    units = list(dict.fromkeys(row.unit for row in ledger.allocations))
    moment = widgets.SelectionSlider(options=stops, description="time", continuous_update=False)
    unit = widgets.Dropdown(options=[("all units", None), *((name or "(none)", name) for name in units)], description="unit")
    return Explorer(lambda moment, unit: held_at(ledger, moment, unit=unit), moment=moment, unit=unit)


def gather(ledger: Ledger, unit: str | None = None) -> Explorer:
    """Step through one unit's first gather: shards alone, the buffer filling, the whole weight, and free again.

    Raises:
        FsdpRefError: nothing was gathered.
    """
    gathered = [e for e in sorted(ledger.events, key=lambda e: e.start) if e.lane == Lane.ALL_GATHER]
    units = [name for name in dict.fromkeys(e.unit for e in gathered) if any(row.unit == name for row in ledger.allocations)]
    if not units:
        raise FsdpRefError("no unit was gathered in this recording; record a step under ZeRO-3")
    if unit is not None and unit not in units:
        raise ConfigError(f"unit {unit!r} was not gathered; choose one of {units}")
    places = ["before the gather", "on the wire", "the whole weight is there", "free again"]

    def moment_of(name: str, place: int) -> float:
        first = next(e for e in gathered if e.unit == name)
        whole = [a for a in ledger.allocations if a.unit == name and a.rank == first.rank and a.category == Category.UNSHARDED_PARAM
                 and a.start >= first.start]
        begin, end = extent(ledger)
        born = whole[0].start if whole else first.end
        dead = whole[0].end if whole and whole[0].end is not None else end
        return min(end, max(begin, (first.start - 1e-9, (first.start + first.end) / 2, (born + dead) / 2, dead + 1e-9)[place]))

    which = widgets.Dropdown(options=units, value=unit or units[0], description="unit")
    step = widgets.SelectionSlider(options=[(text, i) for i, text in enumerate(places)], description="step", continuous_update=False)
    return Explorer(lambda unit, step: held_at(ledger, moment_of(unit, step), unit=unit), unit=which, step=step)


def ring(kind: str = "all-reduce", world: int = 4) -> Explorer:
    """Step through a ring collective; choose the collective and the number of ranks. A step past the last shows the last."""
    kinds = widgets.Dropdown(options=["all-gather", "reduce-scatter", "all-reduce"], value=kind, description="collective")
    ranks = widgets.IntSlider(value=world, min=2, max=8, description="ranks", continuous_update=False)
    step = widgets.IntSlider(value=0, min=0, max=2 * (world - 1), description="step", continuous_update=False)

    def last() -> int:
        return (2 if kinds.value == "all-reduce" else 1) * (ranks.value - 1)

    def fit(_: object) -> None:
        step.max = last()

    for control in (kinds, ranks):
        control.observe(fit, names="value")
    fit(None)
    return Explorer(lambda kind, world, step: draw_ring(kind, world, step=min(step, (2 if kind == "all-reduce" else 1) * (world - 1))),
                    kind=kinds, world=ranks, step=step)


def strategies(ledgers: Mapping[str, Ledger]) -> Explorer:
    """Choose a strategy, a picture and a rank.

    Raises:
        ConfigError: `ledgers` is empty.
    """
    if not ledgers:
        raise ConfigError('strategies needs a dict from name to ledger; call strategies({"DDP": one, "ZeRO-3": other})')
    pictures = {"timeline": lambda name, rank: step_timeline(ledgers[name], ranks=None if rank is None else [rank]),
                "memory": lambda name, rank: memory_by_rank(ledgers[name], ranks=None if rank is None else [rank]),
                "shards": lambda name, rank: shard_map(ledgers[name], ranks=None if rank is None else [rank]),
                "lives of weights": lambda name, rank: weight_lifetimes(ledgers[name], rank or 0),
                "held, all strategies": lambda name, rank: held_by_stage(ledgers),
                "sent, all strategies": lambda name, rank: wire_by_stage(ledgers),
                "memory, all strategies": lambda name, rank: memory_over_step(ledgers, rank=rank)}
    ranks = sorted({rank for ledger in ledgers.values() for rank in ledger.ranks})
    stage = widgets.Dropdown(options=list(ledgers), description="strategy")
    what = widgets.Dropdown(options=list(pictures), description="picture")
    rank = widgets.Dropdown(options=[("all ranks", None), *((f"rank {r}", r) for r in ranks)], description="rank")
    return Explorer(lambda stage, what, rank: pictures[what](stage, rank), stage=stage, what=what, rank=rank)
