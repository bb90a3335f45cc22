"""Picture 2: what every rank did during one step: a row group a rank, a lane for compute, each collective and the optimizer.

Communication that ran under compute is plain; exposed communication, and the time a rank was blocked, are hatched. A tick on a
collective's bar marks the moment the last rank came: what stands before it is waiting for others, not transfer. This module must
never draw an event longer or shorter than it was recorded, except where a recording has more thin stretches than the page has pixels
(thinned.py says what is drawn then).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..errors import ConfigError
from ..garbage import uncollected
from ..ledger import Event, Lane, Ledger
from . import style, thinned
from .intervals import Stretches, cut, gaps
from .notes import in_words, notes
from .overlap import (
    COMMUNICATION,
    Lanes,
    RankTimes,
    drawable,
    lanes_of_ranks,
    last_arrivals,
    rank_times,
)
from .phases import draw_lines, draw_names, phase_of, phase_spans, unit_labels
from .picture import Picture
from .units import Unit, figures, time_unit

RANK_LIMIT = 8          # ranks drawn
LANE, GAP = 0.19, 0.13  # inches: a lane's height, the gap between two ranks
LEFT, RIGHT = 1.5, 1.05
ORDER = (Lane.COMPUTE, Lane.ALL_GATHER, Lane.REDUCE_SCATTER, Lane.ALL_REDUCE, Lane.OTHER, Lane.OPTIMIZER, Lane.CHECKPOINT)


@dataclass
class _Marks:
    """What is to be drawn, in seconds from the picture's zero, collected by look, so that each look is one artist."""

    least: float                                                                                 # seconds that have room for a label
    boxes: dict[style.Style, list[np.ndarray]] = field(default_factory=dict)                     # each (n, 4): x0, x1, y0, y1
    labels: list[tuple[float, float, float, str, style.Style]] = field(default_factory=list)     # x0, x1, y, unit, look
    ticks: list[tuple[float, float, float, float]] = field(default_factory=list)                 # x, y0, y1, the bar's length

    def box(self, spans: np.ndarray, low: float, high: float, look: style.Style) -> None:
        if len(spans):
            corners = np.empty((len(spans), 4))
            corners[:, :2], corners[:, 2], corners[:, 3] = spans, low, high
            self.boxes.setdefault(look, []).append(corners)


@uncollected()
def step_timeline(ledger: Ledger, *, ranks: list[int] | None = None) -> Picture:
    """One step on every rank: when it computed, when it communicated, and how much of that was exposed.

    Args:
        ledger: the merged ledger of one step (cut a longer recording with `ledger.window("step 3")`).
        ranks: the ranks to draw (default: the first 8; the title says when there are more). The table has all.

    The overlap is Holistic Trace Analysis's: communication time with compute in progress / communication time.

    Raises:
        FsdpRefError: the ledger holds no events.
        ConfigError: a rank is not in the ledger.
    """
    found = drawable(ledger)
    arrivals, events = last_arrivals(found), lanes_of_ranks(found)
    times = rank_times(ledger, events, arrivals)
    chosen = list(events)[:RANK_LIMIT] if ranks is None else list(ranks)
    if not chosen or (set(chosen) - set(events)):
        raise ConfigError(f"ranks {chosen} are not all in the ledger; choose from {list(events)}")
    unit = time_unit(max(row.step for row in times))
    heading = f"One step on {len(events)} rank{'s' * (len(events) > 1)}: compute and communication"
    more = f"; {len(events) - len(chosen)} more ranks not drawn, see the table" if len(chosen) < len(events) else ""
    said = notes(ledger)
    with style.look():
        figure = _draw({rank: events[rank] for rank in chosen}, arrivals, times, unit, heading, more, said)
    return Picture(figure, _alt(times, unit, heading) + in_words(said), _table(times, unit), heading)


def _table(times: list[RankTimes], unit: Unit) -> list[dict[str, object]]:
    """One row a rank."""
    columns = {"step": "step", "compute": "compute", "communication": "communication", "exposed": "exposed",
               "before last rank came": "early"}
    return [{"rank": row.rank, **{f"{text} {unit.name}": unit.of(getattr(row, name)) for text, name in columns.items()},
             "overlap %": row.overlap_percent} for row in times]


def _alt(times: list[RankTimes], unit: Unit, heading: str) -> str:
    parts = []
    for row in times[:RANK_LIMIT]:
        talk = (f"communication {unit.text(row.communication)}, {_overlap(row)} of it under compute, {unit.text(row.exposed)} exposed"
                if row.communication else "no communication")
        parts.append(f"Rank {row.rank}: step {unit.text(row.step)}, compute {unit.text(row.compute)}, {talk}.")
    return f"{heading}. " + " ".join(parts) + (f" {len(times) - RANK_LIMIT} more ranks in the table." if len(times) > RANK_LIMIT else "")


def _overlap(row: RankTimes) -> str:
    return "–" if row.overlap_percent is None else f"{figures(row.overlap_percent)} %"


# -- where things go ----------------------------------------------------------------------------------------------------------


def own_stretches(own: Lanes) -> tuple[list[Event], np.ndarray, Stretches]:
    """One rank's compute events, and the time that is each one's own: its span less the compute events inside it and less waits.

    forward of the root 0-10, forward of a layer 2-5, a wait 1-2: the root's own time is 0-1 and 5-10, the layer's 2-5.

    Returns:
        the events, and the stretches (m, 2) with the number of the event that each belongs to, (m,).
    """
    compute = sorted(own.get(Lane.COMPUTE, ()), key=lambda e: (e.start, -e.end))
    rows: list[tuple[int, float, float]] = []       # the innermost event that is open, from when to when
    open_: list[int] = []
    since = 0.0

    def pass_time(until: float) -> None:
        nonlocal since
        while open_ and compute[open_[-1]].end <= until:
            last = open_.pop()
            rows.append((last, since, compute[last].end))
            since = max(since, compute[last].end)
        if open_:
            rows.append((open_[-1], since, until))
        since = until

    for i, event in enumerate(compute):
        pass_time(event.start)
        open_.append(i)
    pass_time(float("inf"))
    owner = np.array([i for i, _, _ in rows], int)
    which, pieces = cut([(start, end) for _, start, end in rows], gaps(own.stretches(Lane.WAIT)))
    return compute, owner[which], pieces


def tracks(events: list[Event]) -> list[int]:
    """The track of each event (in order of start) such that two events in flight at once never share one."""
    free_at: list[float] = []
    chosen = []
    for event in events:
        track = 0
        while track < len(free_at) and free_at[track] > event.start:
            track += 1
        free_at[track:track + 1] = [event.end]
        chosen.append(track)
    return chosen


def _plan(ranks: dict[int, Lanes]) -> tuple[list[Lane], dict[Lane, float]]:
    """The lanes that any rank uses and their heights in inches: a lane with several collectives in flight is taller."""
    lanes = [lane for lane in ORDER if any(lane in own for own in ranks.values())]
    most = {lane: max(1 + max(tracks(own.get(lane, [])), default=0) for own in ranks.values()) for lane in lanes}
    return lanes, {lane: LANE if lane == Lane.COMPUTE else LANE * min(1 + 0.4 * (most[lane] - 1), 3.0) for lane in lanes}


# -- drawing ------------------------------------------------------------------------------------------------------------------


def _draw(ranks: dict[int, Lanes], arrivals: dict, times: list[RankTimes], unit: Unit, heading: str, more: str,
          said: list[str]) -> Figure:
    lanes, heights = _plan(ranks)
    group = sum(heights.values())
    top, bottom, body = 0.72 + 0.15 * len(said), 0.98, len(ranks) * (group + GAP)
    figure = style.new_figure(top + body + bottom)
    style.title(figure, heading, "hatched = exposed (no compute in progress) or blocked; tick = the last rank came to that collective"
                + more, said)
    axes = style.axes_in_inches(figure, LEFT, RIGHT, top, bottom)
    zero = min(own.ends[0] for own in ranks.values())
    span = max(own.ends[1] for own in ranks.values()) - zero
    axes.set_xlim(0, unit.of(span) or 1)
    axes.set_ylim(body, 0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"time since the first event of the step ({unit.name})", labelpad=2)
    names = unit_labels(list(dict.fromkeys(event.unit for own in ranks.values() for lane in (Lane.COMPUTE, *COMMUNICATION)
                                           for event in own.get(lane, ()) if event.unit)))
    inches = style.WIDTH - LEFT - RIGHT
    marks, by_number = _Marks(least=0.08 / inches * (span or unit.size)), {row.rank: row for row in times}
    y = GAP / 2
    for rank, own in ranks.items():
        for lane in lanes:
            _collect(marks, own, lane, (y, heights[lane]), arrivals)
            axes.text(-0.01, y + heights[lane] / 2, lane, transform=axes.get_yaxis_transform(), ha="right", va="center",
                      fontsize=style.SMALL - 0.5)
            y += heights[lane]
        _rank_margin(axes, by_number[rank], y - group, group, unit)
        y += GAP
    _paint(axes, marks, names, zero, unit)
    first = chain.from_iterable(next(iter(ranks.values())).values())
    spans = [(name, unit.of(start - zero), unit.of(end - zero)) for name, start, end in phase_spans(list(first))]
    draw_lines(axes, spans)
    draw_names(axes, spans)
    _keys(figure, marks, lanes, names)
    return figure


def _collect(marks: _Marks, own: Lanes, lane: Lane, place: tuple[float, float], arrivals: dict[tuple, float]) -> None:
    """The boxes, labels and ticks of one lane of one rank, in `place` (y, height)."""
    low, high = place[0] + 0.015, sum(place) - 0.015
    if lane == Lane.COMPUTE:
        compute, owner, pieces = own_stretches(own)
        backward = np.array([phase_of(event) == "backward" for event in compute], bool)
        marks.box(pieces[~backward[owner]], low, high, style.FORWARD)
        marks.box(pieces[backward[owner]], low, high, style.BACKWARD)
        longest = {owner[i]: i for i in np.argsort(pieces[:, 1] - pieces[:, 0], kind="stable")}
        for i in (i for i in longest.values() if pieces[i, 1] - pieces[i, 0] > marks.least):
            look = style.BACKWARD if backward[owner[i]] else style.FORWARD
            marks.labels.append((*pieces[i], (low + high) / 2, compute[owner[i]].unit, look))
        marks.box(own.spans(Lane.WAIT), low, high, style.LANES[Lane.WAIT])
        return
    events, look = own.get(lane, []), style.LANES[lane]
    hatched, placed, whole = style.Style(look.fill, look.letter, style.LOST), np.array(tracks(events), int), own.spans(lane)
    each = (high - low) / (placed.max(initial=0) + 1)
    owner, bare = cut(whole, gaps(own.busy) if lane in COMMUNICATION else np.empty((0, 2)))       # what is exposed of which event
    for track in range(placed.max(initial=-1) + 1):
        marks.box(whole[placed == track], low + track * each, low + (track + 1) * each, look)
        marks.box(bare[placed[owner] == track], low + track * each, low + (track + 1) * each, hatched)
    exposed, lasted = set(owner.tolist()), whole[:, 1] - whole[:, 0]
    for i in np.flatnonzero(lasted > marks.least) if each > 0.12 else ():
        marks.labels.append((*whole[i], low + (placed[i] + 0.5) * each, events[i].unit, hatched if i in exposed else look))
    early = own.before_the_last(lane, arrivals)
    for i in np.flatnonzero((early[:, 0] < early[:, 1]) & (early[:, 1] < whole[:, 1])):
        marks.ticks.append((early[i, 1], low + placed[i] * each, low + (placed[i] + 1) * each, lasted[i]))


def _paint(axes: Axes, marks: _Marks, names: dict[str, str], zero: float, unit: Unit) -> None:
    """All boxes, one artist a look; then labels where they fit, and ticks."""
    left, right = axes.get_xlim()
    inches = (style.WIDTH - LEFT - RIGHT) / (right - left)
    boxes = {look: np.concatenate(corners) for look, corners in marks.boxes.items()}
    for found in boxes.values():
        found[:, :2] = (found[:, :2] - zero) / unit.size
    pixel = 1 / style.DPI / inches
    below = np.concatenate([np.empty((0, 4)), *(boxes[look] for look in boxes if not look.hatch or look is style.LANES[Lane.WAIT])])
    for look, found in boxes.items():
        wide = found[:, 1] - found[:, 0] >= 0.03 / inches
        order, thin = 3 if look.hatch else 2, found[~wide]
        if len(thin) > 2 * (right - left) / pixel:
            thin = thinned.mostly(found, below, pixel) if look.hatch else thinned.joined(thin, pixel / 2)
        style.boxes(axes, found[wide], look, edge=0.5, order=order)
        style.boxes(axes, thin, look, edge=0, order=order)
    for x0, x1, y, name, look in marks.labels:
        short = names.get(name, "")
        words = [name, short] if short else []
        if look in (style.FORWARD, style.BACKWARD):
            words = [f"{look.letter} {name}"] * (short != name) + [look.letter + short, short]
        room = unit.of(x1 - x0) * inches - 0.03
        if text := next((w for w in words if style.text_width(w, style.SMALL - 1) <= room), ""):
            style.label(axes, unit.of((x0 + x1) / 2 - zero), y, text, look.fill, size=style.SMALL - 1, backed=bool(look.hatch))
    if ticks := [tick[:3] for tick in marks.ticks if unit.of(tick[3]) * inches >= 0.06]:      # on a shorter bar a tick would hide the bar
        xs, lows, highs = zip(*ticks, strict=True)
        xs = [unit.of(x - zero) for x in xs]
        axes.vlines(xs, lows, highs, color=style.PAPER, linewidth=3.0, zorder=4)
        axes.vlines(xs, lows, highs, color=style.EDGE, linewidth=1.6, zorder=5)


def _rank_margin(axes: Axes, row: RankTimes, y: float, height: float, unit: Unit) -> None:
    """The rank's number on the left; overlap and exposed time on the right; a rule under the group."""
    width = style.WIDTH - LEFT - RIGHT
    across = axes.get_yaxis_transform()
    axes.text(-(LEFT - 0.1) / width, y + height / 2, f"rank {row.rank}", transform=across, fontweight="bold", va="center")
    result = f"overlap {_overlap(row)}\nexposed\n{unit.text(row.exposed)}" if row.communication else "no communication"
    axes.text(1.012, y + height / 2, result, transform=across, va="center", fontsize=style.SMALL, linespacing=1.3)
    axes.axhline(y + height + GAP / 2, color="#BBBBBB", linewidth=0.6, zorder=0)


def _keys(figure: Figure, marks: _Marks, lanes: list[Lane], names: dict[str, str]) -> None:
    """The key of looks, and of the units' short labels."""
    entries = [("F  forward", style.FORWARD)] if style.FORWARD in marks.boxes else []
    entries += [("B  backward", style.BACKWARD)] if style.BACKWARD in marks.boxes else []
    entries += [(f"{lane}", style.LANES[lane]) for lane in lanes if lane != Lane.COMPUTE]
    if any(look.hatch and look.fill != style.PAPER for look in marks.boxes):
        entries.append(("exposed", style.Style("#DDDDDD", "", style.LOST)))
    if style.LANES[Lane.WAIT] in marks.boxes:
        entries.append(("blocked, waiting", style.LANES[Lane.WAIT]))
    style.key(figure, entries, columns=4, bottom=0.2)
    short = [f"{label} = {unit}" for unit, label in names.items() if label != unit]
    text = ", ".join(short[:8]) + (f", and {len(short) - 8} more" if len(short) > 8 else "")
    width, height = figure.get_size_inches()
    figure.text(0.1 / width, 0.06 / height, style.shorten(text, 150), fontsize=style.SMALL - 0.5, color="#333333")
