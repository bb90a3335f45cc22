"""Picture 3: which bytes were alive during one step, stacked by category, one panel per strategy on the same axes.

Memory is piecewise constant: it changes only where an allocation begins or ends, so the edges drawn are exact, not sampled. (Where
there are more of them than half pixels, each half pixel shows the moment in it with the highest total, so no peak is lost.) The
figures are the engine's own books (parameters, gradients, optimizer state, buffers), not the process's size. This module must
never give two panels different axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from ..errors import ConfigError, FsdpRefError
from ..garbage import uncollected
from ..ledger import Allocation, Category, Event, Ledger
from . import style, thinned
from .phases import draw_lines, draw_names, phase_spans
from .picture import Picture
from .units import Unit, byte_unit, time_unit

_ORDER = {category: i for i, category in enumerate(Category)}       # a category is a str, so its plain text finds it too


@dataclass(frozen=True)
class Curve:
    """One rank's memory: `levels[c, i]` bytes of category c are alive from `edges[i]` to `edges[i + 1]` (seconds from the start)."""

    name: str
    rank: int
    edges: np.ndarray        # (n + 1,)
    levels: np.ndarray       # (categories, n)
    phases: list[tuple[str, float, float]]

    @cached_property
    def total(self) -> np.ndarray:
        return self.levels.sum(axis=0)

    @property
    def peak(self) -> int:
        """The most bytes alive at one moment."""
        return int(self.total.max())

    @property
    def peak_time(self) -> float:
        return float(self.edges[int(self.total.argmax())])


@uncollected()
def memory_over_step(ledgers: Mapping[str, Ledger], *, rank: int | None = 0) -> Picture:
    """Memory by category over one step, one panel per entry of `ledgers` ({"DDP": ledger, "ZeRO-3": ledger}).

    Args:
        ledgers: name of the strategy -> the ledger of one step (cut a longer recording with `ledger.window("step 3")`).
        rank: the rank to draw; None draws, for each strategy, the rank whose peak is highest.

    Raises:
        ConfigError: `ledgers` is empty or no dict.
        FsdpRefError: a ledger has no allocations, or none of `rank`.
    """
    if not isinstance(ledgers, Mapping) or not ledgers:
        raise ConfigError('memory_over_step needs a dict from name to ledger; call memory_over_step({"ZeRO-3": ledger})')
    curves = [curve_of(name, ledger, rank) for name, ledger in ledgers.items()]
    size = byte_unit(max(curve.peak for curve in curves))
    time = time_unit(max(float(curve.edges[-1]) for curve in curves))
    heading = "Memory over one step, by category"
    with style.look():
        figure = _draw(curves, size, time, heading)
    return Picture(figure, _alt(curves, size, time), _table(curves, size), heading)


# -- numbers ------------------------------------------------------------------------------------------------------------------


def curve_of(name: str, ledger: Ledger, rank: int | None) -> Curve:
    """The memory of one rank of one ledger; the picture's time starts where the ledger (or the window) starts."""
    ranks = sorted({row.rank for row in ledger.allocations})
    if not ranks:
        raise FsdpRefError(f"the ledger of {name!r} holds no allocations; record a step of a model that the engine manages"
                           " (with record() as ledger: step())")
    if rank is None:
        rank = max(ranks, key=lambda r: (ledger.peak_bytes(r), -r))
    if rank not in ranks:
        raise FsdpRefError(f"the ledger of {name!r} holds nothing of rank {rank}; choose one of {ranks}, or gather the ledgers of all"
                           " ranks")
    events = [event for event in ledger.events if event.rank == rank and event.phase != "mark"]
    rows = [row for row in ledger.allocations if row.rank == rank]
    begin, end = _span(ledger, rows, events)
    alive = [(row, max(row.start, begin), end if row.end is None else min(row.end, end)) for row in rows]
    alive = [(row, start, stop) for row, start, stop in alive if start < stop]
    edges = np.unique(np.array([begin, end] + [moment for _, start, stop in alive for moment in (start, stop)]))
    changes = np.zeros((len(Category), len(edges)), dtype=np.int64)
    kind = [_ORDER[row.category] for row, _, _ in alive]
    nbytes = [row.bytes for row, _, _ in alive]
    np.add.at(changes, (kind, np.searchsorted(edges, [start for _, start, _ in alive])), nbytes)
    np.subtract.at(changes, (kind, np.searchsorted(edges, [stop for _, _, stop in alive])), nbytes)
    phases = [(phase, max(a, begin) - begin, min(b, end) - begin) for phase, a, b in phase_spans(events) if b > begin and a < end]
    return Curve(name, rank, edges - begin, changes.cumsum(axis=1)[:, :-1], phases)


def _span(ledger: Ledger, rows: list[Allocation], events: list[Event]) -> tuple[float, float]:
    """From where to where to draw: the recording (or window) when the ledger says it, else all that is in it."""
    if ledger.end > ledger.start:
        return ledger.start, ledger.end
    moments = [row.start for row in rows] + [row.end for row in rows if row.end is not None]
    moments += [moment for event in events for moment in (event.start, event.end)]
    return min(moments), max(max(moments), min(moments) + 1e-6)


def _table(curves: list[Curve], size: Unit) -> list[dict[str, object]]:
    """One row a category (its own peak), then the peak of all together, which is less than the sum where peaks fall apart."""
    rows: list[dict[str, object]] = []
    for i, category in enumerate(Category):
        if any(curve.levels[i].any() for curve in curves):
            rows.append({"category": str(category)} | {_heading(c, size): size.of(int(c.levels[i].max())) for c in curves})
    rows.append({"category": "all at one moment"} | {_heading(c, size): size.of(c.peak) for c in curves})
    return rows


def _heading(curve: Curve, size: Unit) -> str:
    return f"{curve.name} rank {curve.rank}, peak {size.name}"


def _alt(curves: list[Curve], size: Unit, time: Unit) -> str:
    parts = []
    for curve in curves:
        at = int(curve.total.argmax())
        kinds = [(int(curve.levels[i, at]), str(category)) for i, category in enumerate(Category) if curve.levels[i, at]]
        made = ", ".join(f"{kind} {size.text(nbytes)}" for nbytes, kind in sorted(kinds, key=lambda pair: -pair[0]))
        parts.append(f"{curve.name}, rank {curve.rank}: peak {size.text(curve.peak)} at {time.text(curve.peak_time)} of"
                     f" {time.text(float(curve.edges[-1]))}, made of {made or 'nothing'}.")
    panels = "1 panel" if len(curves) == 1 else f"{len(curves)} panels on the same axes"
    return f"Stacked areas of memory by category over one step, {panels}. " + " ".join(parts)


# -- drawing ------------------------------------------------------------------------------------------------------------------


def _draw(curves: list[Curve], size: Unit, time: Unit, heading: str) -> Figure:
    columns = min(len(curves), 2 if len(curves) <= 4 else 3)
    lines = -(-len(curves) // columns)
    top, bottom, height = 0.95, 0.98, 2.35
    total = top + bottom + lines * height + (lines - 1) * 0.75
    figure = style.new_figure(total)
    style.title(figure, heading,
                "the engine's books: parameters, gradients, optimizer state, buffers (small letter = shard, capital = whole)")
    width = (style.WIDTH - 0.75 - 0.15 - (columns - 1) * 0.3) / columns
    longest, highest = max(float(c.edges[-1]) for c in curves), max(c.peak for c in curves)
    for i, curve in enumerate(curves):
        line, column = divmod(i, columns)
        left, low = 0.75 + column * (width + 0.3), bottom + (lines - 1 - line) * (height + 0.75)
        axes = figure.add_axes((left / style.WIDTH, low / total, width / style.WIDTH, height / total))
        axes.set_xlim(0, time.of(longest))
        axes.set_ylim(0, max(size.of(highest), 1e-9) * 1.22)
        draw_panel(axes, curve, size, time)
        axes.set_xlabel(f"time since the start of the step ({time.name})")
        if column == 0:
            axes.set_ylabel(f"bytes alive ({size.name})")
        else:
            axes.tick_params(labelleft=False)
    shown = [c for i, c in enumerate(Category) if any(curve.levels[i].any() for curve in curves)]
    style.key(figure, [(f"{style.CATEGORIES[c].letter}  {c}", style.CATEGORIES[c]) for c in shown], columns=4)
    return figure


def draw_panel(axes: Axes, curve: Curve, size: Unit, time: Unit, heading: str = "") -> None:
    """One rank's stacked areas, phases and labelled peak; the caller has set the limits of the axes."""
    axes.set_title(heading or f"{curve.name}, rank {curve.rank}", pad=17, fontsize=style.NORMAL + 1)
    edges, levels = thinned.fullest(curve.edges, curve.levels, 2 * round(axes.get_position().width * style.WIDTH * style.DPI))
    edges, floor = edges / time.size, np.zeros(levels.shape[1])
    for i, category in enumerate(Category):
        ceiling = floor + levels[i] / size.size
        _draw_band(axes, edges, floor, ceiling, style.CATEGORIES[category])
        floor = ceiling
    spans = [(phase, time.of(start), time.of(end)) for phase, start, end in curve.phases]
    draw_lines(axes, spans, order=1)
    draw_names(axes, spans, y=1.015)
    x, y = time.of(curve.peak_time), size.of(curve.peak)
    left, right = axes.get_xlim()
    late = x > left + 0.6 * (right - left)
    axes.plot([x], [y], marker="o", markersize=4, color=style.EDGE, zorder=7)
    axes.annotate(f"peak {size.text(curve.peak)}", (x, y), xytext=(-4 if late else 4, 5), textcoords="offset points", fontweight="bold",
                  ha="right" if late else "left", va="bottom", zorder=8)


def _draw_band(axes: Axes, edges: np.ndarray, floor: np.ndarray, ceiling: np.ndarray, look: style.Style) -> None:
    """One category: a polygon for each stretch of time in which it is not empty, and its letter in the roomiest constant piece."""
    changed = np.flatnonzero(np.diff(floor) != 0) + 1, np.flatnonzero(np.diff(ceiling) != 0) + 1
    starts = np.unique(np.concatenate(([0], *changed)))                # pieces in which neither boundary moves
    ends = np.append(starts[1:], len(floor))
    pieces = [(edges[a], edges[b], floor[a], ceiling[a]) for a, b in zip(starts, ends, strict=True) if ceiling[a] > floor[a]]
    polygons: list[tuple[list, list]] = []
    for i, (x0, x1, y0, y1) in enumerate(pieces):
        if i == 0 or pieces[i - 1][1] != x0:
            polygons.append(([], []))
        polygons[-1][0].extend(((x0, y1), (x1, y1)))
        polygons[-1][1].extend(((x0, y0), (x1, y0)))
    axes.add_collection(PolyCollection([over + under[::-1] for over, under in polygons], facecolors=look.fill, edgecolors=style.EDGE,
                                       linewidths=0.5, hatch=look.hatch or None, zorder=2), autolim=False)
    if pieces:
        x0, x1, y0, y1 = max(pieces, key=lambda p: min(_inches(axes, p)))
        if min(_inches(axes, (x0, x1, y0, y1))) > 0.11:
            style.label(axes, (x0 + x1) / 2, (y0 + y1) / 2, look.letter, look.fill, size=style.NORMAL + 1, backed=True, fontweight="bold")


def _inches(axes: Axes, piece: tuple[float, float, float, float]) -> tuple[float, float]:
    """Width and height of a piece on paper."""
    box = axes.get_position()
    wide, high = axes.figure.get_size_inches()
    (left, right), (low, top) = axes.get_xlim(), axes.get_ylim()
    return (piece[1] - piece[0]) / (right - left) * box.width * wide, (piece[3] - piece[2]) / (top - low) * box.height * high
