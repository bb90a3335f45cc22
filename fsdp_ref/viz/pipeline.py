"""A pipeline schedule as a grid: a line a rank, time to the right, a box a piece of work; the micro-batches in flight; the bubble.

Takes plain boxes, from a simulation or a measurement, so this part knows no schedule. Both customary figures are printed: bubble / ideal
(GPipe's and Megatron's, (p-1)/m for 1F1B) and bubble / total. This module must never fill idle time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..errors import ConfigError
from . import style
from .picture import Picture
from .units import figures, percent

LOOKS = {"F": style.FORWARD, "B": style.BACKWARD, "W": style.Style("#DDDDDD", "W", ".."), "O": style.Style("#009E73", "O")}
NAMES = {"F": "F  forward", "B": "B  backward", "W": "W  weight gradient", "O": "O  optimizer"}


@dataclass(frozen=True)
class Box:
    """One piece of work: micro-batch `batch` (-1: of none) of model chunk `chunk` on `rank`, kind F, B, W or O, from `start` to `end`."""

    rank: int
    kind: str
    batch: int
    start: float
    end: float
    chunk: int = 0


def pipeline_grid(boxes: Sequence[Box], *, name: str = "schedule", unit: str = "units of time") -> Picture:
    """The schedule's grid, activations in flight below it, and the bubble.

    A micro-batch is in flight on a rank from the end of its F to the end of its B.

    Raises:
        ConfigError: there are no boxes, a kind is unknown, a box ends before it starts, or two boxes of a rank overlap.
    """
    _check(boxes)
    ranks = sorted({box.rank for box in boxes})
    total = max(box.end for box in boxes) - min(box.start for box in boxes)
    rows = []
    for rank in ranks:
        own = [box for box in boxes if box.rank == rank]
        busy = sum(box.end - box.start for box in own)
        rows.append({"rank": rank, f"busy, {unit}": busy, f"idle, {unit}": total - busy, "bubble / ideal %": percent(total - busy, busy),
                     "bubble / total %": percent(total - busy, total), "most in flight": max(n for _, n in in_flight(boxes, rank))})
    idle, ideal = (sum(row[f"{what}, {unit}"] for row in rows) for what in ("idle", "busy"))
    bubble = f"bubble {figures(100 * idle / ideal)} % of the ideal, {figures(100 * idle / (idle + ideal))} % of the total"
    heading = f"Pipeline {name}: {len(ranks)} ranks, {len({box.batch for box in boxes if box.batch >= 0})} micro-batches"
    alt = f"{heading}; {bubble}. " + " ".join(f"Rank {row['rank']}: at most {row['most in flight']} in flight." for row in rows)
    with style.look():
        return Picture(_draw(boxes, ranks, heading, bubble, unit), alt, rows, heading)


def _check(boxes: Sequence[Box]) -> None:
    if not boxes:
        raise ConfigError("a pipeline picture needs at least one box; give the boxes of a schedule")
    last: dict[int, Box] = {}
    for box in sorted(boxes, key=lambda box: box.start):
        if box.kind not in LOOKS or box.end < box.start:
            raise ConfigError(f"{box} is no piece of work; its kind is one of {', '.join(LOOKS)} and it ends after it starts")
        if box.rank in last and last[box.rank].end > box.start + 1e-9:
            raise ConfigError(f"rank {box.rank} does two things at once, {last[box.rank]} and {box}; mend the schedule")
        last[box.rank] = box


def in_flight(boxes: Sequence[Box], rank: int) -> list[tuple[float, int]]:
    """(moment, micro-batches whose activations `rank` keeps from then on), in order."""
    changes = [(box.end, 1 if box.kind == "F" else -1) for box in boxes if box.rank == rank and box.kind in "FB"]
    found, alive = [(min(box.start for box in boxes), 0)], 0
    for moment, change in sorted(changes):
        alive += change
        found.append((moment, alive))
    return found


def _draw(boxes: Sequence[Box], ranks: list[int], heading: str, bubble: str, unit: str) -> Figure:
    line, top, gap, low, bottom = 0.3, 0.55, 0.12, 0.22, 0.78
    figure = style.new_figure(top + line * len(ranks) + gap + low * len(ranks) + bottom)
    style.title(figure, heading, f"in a box: its micro-batch, underlined in a second model chunk; white: idle; {bubble}")
    axes = style.axes_in_inches(figure, 0.75, 0.95, top, bottom + low * len(ranks) + gap)
    below = style.axes_in_inches(figure, 0.75, 0.95, top + line * len(ranks) + gap, bottom)
    start, end = min(box.start for box in boxes), max(box.end for box in boxes)
    for each in (axes, below):
        each.set_xlim(start, end)
        each.set_ylim(len(ranks), 0)
        each.set_yticks([i + 0.5 for i in range(len(ranks))], [f"rank {rank}" for rank in ranks])
        each.tick_params(axis="y", length=0)
    axes.tick_params(labelbottom=False)
    across = (style.WIDTH - 1.7) / (end - start or 1)
    for box in boxes:
        _box(axes, box, ranks.index(box.rank), across)
    most = max(n for rank in ranks for _, n in in_flight(boxes, rank)) or 1
    for i, rank in enumerate(ranks):
        steps = in_flight(boxes, rank)
        bars = [(a, b, i + 0.95 - 0.85 * n / most, i + 0.95) for (a, n), (b, _) in zip(steps, [*steps[1:], (end, 0)],
                                                                                       strict=True) if n and b > a]
        style.boxes(below, bars, style.Style("#EEEEEE", ""), edge=0.4)
        below.text(1.01, i + 0.5, f"≤ {max(n for _, n in steps)} in flight", transform=below.get_yaxis_transform(), va="center",
                   fontsize=style.SMALL)
    below.set_xlabel(unit)
    kinds = [kind for kind in LOOKS if any(box.kind == kind for box in boxes)]
    style.key(figure, [*((NAMES[kind], LOOKS[kind]) for kind in kinds), ("micro-batches in flight", style.Style("#EEEEEE", ""))], columns=5,
              bottom=0.1)
    return figure


def _box(axes: Axes, box: Box, line: int, across: float) -> None:
    look = LOOKS[box.kind]
    style.boxes(axes, [(box.start, box.end, line + 0.08, line + 0.92)], look, edge=0.5)
    text = (box.kind if box.batch < 0 else f"{box.kind}{box.batch}", box.kind if box.batch < 0 else str(box.batch))
    room = (box.end - box.start) * across - 0.03
    if shown := next((t for t in text if style.text_width(t, style.SMALL) <= room), ""):
        style.label(axes, (box.start + box.end) / 2, line + 0.5, shown, look.fill, backed=bool(look.hatch))
        if box.chunk:
            half = style.text_width(shown, style.SMALL) / 2 / across
            middle = (box.start + box.end) / 2
            axes.plot([middle - half, middle + half], [line + 0.76] * 2, color=style.ink(look.fill), linewidth=1, zorder=7)
