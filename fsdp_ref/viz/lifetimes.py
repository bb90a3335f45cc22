"""From when to when each unit's whole weight is alive on one rank, and how many bytes of whole weights that is at each moment.

Under ZeRO-3 a unit has two short lives a step; with reshard_after_forward=False one long one; under DDP it never dies. This module must
never join two lives that an instant separates (in the drawing: that half a pixel does).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..errors import FsdpRefError
from ..garbage import uncollected
from ..ledger import Allocation, Category, Ledger
from . import style, thinned
from .notes import in_words, notes
from .overlap import MARK
from .phases import draw_lines, draw_names, phase_spans
from .picture import Picture
from .units import Unit, byte_unit, time_unit

UNIT_LIMIT = 24
LEFT, RIGHT = 1.5, 0.9              # inches beside the axes
WHOLE = style.CATEGORIES[Category.UNSHARDED_PARAM]


@uncollected()
def weight_lifetimes(ledger: Ledger, rank: int = 0) -> Picture:
    """The lives of every unit's whole weight on `rank`, one line a unit.

    Raises:
        FsdpRefError: no whole weight was alive on this rank.
    """
    rows = [row for row in ledger.allocations if row.rank == rank and row.category == Category.UNSHARDED_PARAM]
    if not rows:
        raise FsdpRefError(f"the ledger holds no whole weight of rank {rank}; record a step of a model that the engine manages, and choose "
                           f"one of the ranks {ledger.ranks}")
    events = [event for event in ledger.events if event.rank == rank and event.phase != MARK]
    begin = ledger.start
    end = max([ledger.end, *(row.end for row in rows if row.end is not None), *(event.end for event in events)])
    lives: dict[str, list[tuple[float, float, int]]] = {}
    for row in sorted(rows, key=lambda row: row.start):
        lives.setdefault(row.unit, []).append((max(row.start, begin) - begin, (end if row.end is None else row.end) - begin, row.bytes))
    size, time = byte_unit(max(row.bytes for row in rows)), time_unit(end - begin)
    heading = f"Lives of whole weights on rank {rank}"
    table = [{"unit": unit, "whole weight " + size.name: size.of(max(n for _, _, n in of)), "lives": len(of),
              f"alive {time.name}": time.of(sum(b - a for a, b, _ in of)), "of the step %": 100 * sum(b - a for a, b,
                                                                                                      _ in of) / (end - begin or 1)}
             for unit, of in lives.items()]
    edges, level = _together(rows, begin, end)
    said = notes(ledger)
    alt = (f"{heading}, {len(lives)} units over {time.text(end - begin)}. At most {size.text(float(level.max()))} of whole weights are "
           "alive at one moment. " + " ".join(f"{row['unit']}: alive {row['lives']} times, {row['of the step %']:.0f} % of the step."
                                              for row in table[:8])
           + in_words(said))
    phases = [(name, time.of(a - begin), time.of(b - begin)) for name, a, b in phase_spans(events)]
    with style.look():
        figure = _draw(lives, (edges, level), phases, (size, time), heading, said)
    return Picture(figure, alt, table, heading)


def _together(rows: list[Allocation], begin: float, end: float) -> tuple[np.ndarray, np.ndarray]:
    """Edges (n + 1,) from 0 and bytes alive between them (n,)."""
    spans = [(max(row.start, begin) - begin, (end if row.end is None else row.end) - begin, row.bytes) for row in rows]
    edges = np.unique([0.0, end - begin, *(moment for a, b, _ in spans for moment in (a, b))])
    change = np.zeros(len(edges))
    np.add.at(change, np.searchsorted(edges, [a for a, _, _ in spans]), [n for _, _, n in spans])
    np.subtract.at(change, np.searchsorted(edges, [b for _, b, _ in spans]), [n for _, _, n in spans])
    return edges, change.cumsum()[:-1]


def _lives(axes: Axes, boxes: np.ndarray) -> None:
    """One unit's bars, (n, 4); those too thin for a hatch are plain, and joined where a gap between them is less than half a pixel."""
    left, right = axes.get_xlim()
    pixel = (right - left) / (style.WIDTH - LEFT - RIGHT) / style.DPI
    wide = boxes[:, 1] - boxes[:, 0] >= 3 * pixel
    style.boxes(axes, boxes[wide], WHOLE)
    style.boxes(axes, thinned.joined(boxes[~wide], pixel / 2), replace(WHOLE, hatch=""), edge=0)


def _draw(lives: dict[str, list[tuple[float, float, int]]], together: tuple[np.ndarray, np.ndarray], phases: list[tuple[str, float, float]],
          units: tuple[Unit, Unit], heading: str, said: list[str]) -> Figure:
    size, time = units
    shown = dict(list(lives.items())[:UNIT_LIMIT])
    line, top, low, gap, bottom = 0.21, 0.72 + 0.15 * len(said), 0.75, 0.12, 0.5
    total = top + line * len(shown) + gap + low + bottom
    figure = style.new_figure(total)
    more = f"; {len(lives) - len(shown)} more units in the table" if len(shown) < len(lives) else ""
    style.title(figure, heading, "a bar from the moment the memory is there to the moment it is free; below: all of them together" + more,
                said)
    axes = style.axes_in_inches(figure, LEFT, RIGHT, top, bottom + low + gap)
    below = style.axes_in_inches(figure, LEFT, RIGHT, total - bottom - low, bottom)
    edges, level = together
    for each in (axes, below):
        each.set_xlim(0, time.of(float(edges[-1])) or 1)
        draw_lines(each, phases)
    axes.set_ylim(len(shown), 0)
    axes.set_yticks([i + 0.5 for i in range(len(shown))], [style.shorten(unit, 24) for unit in shown])
    axes.tick_params(axis="both", length=0, labelbottom=False)
    for i, of in enumerate(shown.values()):
        _lives(axes, np.array([(time.of(a), time.of(b), i + 0.14, i + 0.86) for a, b, _ in of]))
        text = f"{size.text(max(n for _, _, n in of))} × {len(of)}"
        axes.text(1.012, i + 0.5, text, transform=axes.get_yaxis_transform(), va="center", fontsize=style.SMALL)
    draw_names(axes, phases)
    edges, (drawn,) = thinned.fullest(edges, level[None], round(2 * (style.WIDTH - LEFT - RIGHT) * style.DPI))
    below.stairs(drawn / size.size, edges / time.size, fill=True, facecolor=WHOLE.fill, edgecolor=style.EDGE, hatch=WHOLE.hatch,
                 linewidth=0.6)
    below.set_ylim(0, size.of(float(level.max())) * 1.3 or 1)
    below.set_ylabel(size.name)
    below.set_xlabel(f"time since the start of the recording ({time.name})")
    below.text(1.012, 0.5, f"at most\n{size.text(float(level.max()))}", transform=below.transAxes, va="center", fontsize=style.SMALL,
               fontweight="bold")
    return figure
