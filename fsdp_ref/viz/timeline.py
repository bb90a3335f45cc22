"""Picture 2: what every rank did during one step: a row group a rank, a lane for compute, each collective and the optimizer.

Communication that ran under compute is plain; exposed communication, and the time a rank was blocked, are hatched. A tick on a
collective's bar marks the moment the last rank came: what stands before it is waiting for others, not transfer. This module must
never draw an event longer or shorter than it was recorded.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..errors import ConfigError
from ..ledger import Event, Lane, Ledger
from . import style
from .intervals import Stretch, length, without
from .overlap import COMMUNICATION, RankTimes, busy, by_rank, drawable, last_arrivals, meeting, rank_times, stretches
from .phases import fitting, phase_of, phase_spans, unit_labels
from .picture import Picture
from .units import Unit, figures, time_unit

RANK_LIMIT = 8          # ranks drawn
LANE, GAP = 0.19, 0.13  # inches: a lane's height, the gap between two ranks
LEFT, RIGHT = 1.5, 1.05
ORDER = (Lane.COMPUTE, Lane.ALL_GATHER, Lane.REDUCE_SCATTER, Lane.ALL_REDUCE, Lane.OTHER, Lane.OPTIMIZER, Lane.CHECKPOINT)


@dataclass
class _Marks:
    """What is to be drawn, collected by look, so that each look is one artist."""

    boxes: dict[style.Style, list[tuple[float, float, float, float]]] = field(default_factory=dict)
    labels: list[tuple[float, float, float, str, style.Style]] = field(default_factory=list)     # x0, x1, y, unit, look
    ticks: list[tuple[float, float, float, float]] = field(default_factory=list)                 # x, y0, y1, the bar's length

    def box(self, stretch: Stretch, low: float, high: float, look: style.Style) -> None:
        self.boxes.setdefault(look, []).append((*stretch, low, high))


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
    times = rank_times(ledger)
    events = by_rank(drawable(ledger))
    chosen = list(events)[:RANK_LIMIT] if ranks is None else list(ranks)
    if not chosen or (set(chosen) - set(events)):
        raise ConfigError(f"ranks {chosen} are not all in the ledger; choose from {list(events)}")
    unit = time_unit(max(row.step for row in times))
    heading = f"One step on {len(events)} rank{'s' * (len(events) > 1)}: compute and communication"
    more = f"; {len(events) - len(chosen)} more ranks not drawn, see the table" if len(chosen) < len(events) else ""
    with style.look():
        figure = _draw({rank: events[rank] for rank in chosen}, last_arrivals(drawable(ledger)), times, unit, heading, more)
    return Picture(figure, _alt(times, unit, heading), _table(times, unit), heading)


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


def own_stretches(events: list[Event]) -> list[tuple[Event, list[Stretch]]]:
    """One rank's compute events, each with the time that is its own: its span less the compute events inside it and less waits.

    forward of the root 0-10, forward of a layer 2-5, a wait 1-2: the root's own time is 0-1 and 5-10, the layer's 2-5.
    """
    blocked = stretches(events, (Lane.WAIT,))
    compute = sorted((e for e in events if e.lane == Lane.COMPUTE), key=lambda e: (e.start, -e.end))
    inside: list[list[Stretch]] = [[] for _ in compute]
    open_: list[int] = []
    for i, event in enumerate(compute):
        while open_ and compute[open_[-1]].end <= event.start:
            open_.pop()
        if open_:
            inside[open_[-1]].append((event.start, min(event.end, compute[open_[-1]].end)))
        open_.append(i)
    return [(event, without(without([(event.start, event.end)], inner), _near(blocked, event)))
            for event, inner in zip(compute, inside, strict=True)]


def _near(a: list[Stretch], event: Event) -> list[Stretch]:
    """The stretches of a union that touch an event (found by bisection, so that long recordings stay quick)."""
    return a[bisect_right(a, event.start, key=lambda s: s[1]):bisect_left(a, event.end, key=lambda s: s[0])]


def tracks(events: list[Event]) -> list[int]:
    """The track of each event (in order of start) such that two events in flight at once never share one."""
    free_at: list[float] = []
    chosen = []
    for event in events:
        track = next((i for i, moment in enumerate(free_at) if moment <= event.start), len(free_at))
        free_at[track:track + 1] = [event.end]
        chosen.append(track)
    return chosen


def _plan(ranks: dict[int, list[Event]]) -> tuple[list[Lane], dict[Lane, float]]:
    """The lanes that any rank uses and their heights in inches: a lane with several collectives in flight is taller."""
    lanes = [lane for lane in ORDER if any(event.lane == lane for events in ranks.values() for event in events)]
    most = {lane: max(1 + max(tracks(_of(events, lane)), default=0) for events in ranks.values()) for lane in lanes}
    return lanes, {lane: LANE if lane == Lane.COMPUTE else LANE * min(1 + 0.4 * (most[lane] - 1), 3.0) for lane in lanes}


def _of(events: list[Event], lane: Lane) -> list[Event]:
    return sorted((event for event in events if event.lane == lane), key=lambda e: (e.start, e.sequence))


# -- drawing ------------------------------------------------------------------------------------------------------------------


def _draw(ranks: dict[int, list[Event]], arrivals: dict, times: list[RankTimes], unit: Unit, heading: str, more: str) -> Figure:
    lanes, heights = _plan(ranks)
    group = sum(heights.values())
    top, bottom, body = 0.72, 0.98, len(ranks) * (group + GAP)
    figure = style.new_figure(top + body + bottom)
    style.title(figure, heading, "hatched = exposed (no compute in progress) or blocked; tick = the last rank came to that collective"
                + more)
    axes = style.axes_in_inches(figure, LEFT, RIGHT, top, bottom)
    zero = min(event.start for events in ranks.values() for event in events)
    span = max(event.end for events in ranks.values() for event in events) - zero
    axes.set_xlim(0, unit.of(span) or 1)
    axes.set_ylim(body, 0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"time since the first event of the step ({unit.name})", labelpad=2)
    names = unit_labels(list(dict.fromkeys(e.unit for events in ranks.values() for e in events
                                  if e.unit and e.lane in (Lane.COMPUTE, *COMMUNICATION))))
    marks, by_number = _Marks(), {row.rank: row for row in times}
    late = {key: unit.of(moment - zero) for key, moment in arrivals.items()}
    y = GAP / 2
    for rank, events in ranks.items():
        moved = _shift(events, zero, unit)
        for lane in lanes:
            _collect(marks, moved, lane, y, heights[lane], late)
            axes.text(-0.01, y + heights[lane] / 2, lane, transform=axes.get_yaxis_transform(), ha="right", va="center",
                      fontsize=style.SMALL - 0.5)
            y += heights[lane]
        _rank_margin(axes, by_number[rank], y - group, group, unit)
        y += GAP
    _paint(axes, marks, names)
    _phases(axes, [(name, unit.of(start - zero), unit.of(end - zero)) for name, start, end in phase_spans(next(iter(ranks.values())))])
    _keys(figure, marks, lanes, names)
    return figure


def _shift(events: list[Event], zero: float, unit: Unit) -> list[Event]:
    """The events in the picture's unit, from its zero."""
    return [Event(e.rank, e.lane, e.name, e.unit, e.phase, unit.of(e.start - zero), unit.of(e.end - zero), group_size=e.group_size,
                  sequence=e.sequence) for e in events]


def _collect(marks: _Marks, events: list[Event], lane: Lane, y: float, height: float, arrivals: dict[tuple, float]) -> None:
    """The boxes, labels and ticks of one lane of one rank."""
    low, high = y + 0.015, y + height - 0.015
    if lane == Lane.COMPUTE:
        for event, own in own_stretches(events):
            look = style.BACKWARD if phase_of(event) == "backward" else style.FORWARD
            for stretch in own:
                marks.box(stretch, low, high, look)
            if own:
                marks.labels.append((*max(own, key=lambda s: s[1] - s[0]), (low + high) / 2, event.unit, look))
        for event in _of(events, Lane.WAIT):
            marks.box((event.start, event.end), low, high, style.LANES[Lane.WAIT])
        return
    own, look, computing = _of(events, lane), style.LANES[lane], busy(events)
    placed = tracks(own)
    each = (high - low) / (max(placed, default=0) + 1)
    for event, track in zip(own, placed, strict=True):
        y0, y1 = low + track * each, low + (track + 1) * each
        marks.box((event.start, event.end), y0, y1, look)
        exposed = without([(event.start, event.end)], _near(computing, event)) if lane in COMMUNICATION else []
        for stretch in exposed:
            marks.box(stretch, y0, y1, style.Style(look.fill, look.letter, style.LOST))
        shown = style.Style(look.fill, look.letter, style.LOST if length(exposed) else "")
        if each > 0.12:
            marks.labels.append((event.start, event.end, (y0 + y1) / 2, event.unit, shown))
        last = arrivals.get(meeting(event), event.start)
        if event.start < last < event.end:
            marks.ticks.append((last, y0, y1, event.end - event.start))


def _paint(axes: Axes, marks: _Marks, names: dict[str, str]) -> None:
    """All boxes, one artist a look; then labels where they fit, and ticks."""
    left, right = axes.get_xlim()
    inches = (style.WIDTH - LEFT - RIGHT) / (right - left)
    for look, corners in marks.boxes.items():
        order = 3 if look.hatch else 2
        style.boxes(axes, [c for c in corners if (c[1] - c[0]) * inches >= 0.03], look, edge=0.5, order=order)
        style.boxes(axes, [c for c in corners if (c[1] - c[0]) * inches < 0.03], look, edge=0, order=order)
    for x0, x1, y, unit, look in (mark for mark in marks.labels if (mark[1] - mark[0]) * inches > 0.08):
        short = names.get(unit, "")
        words = [unit, short] if short else []
        if look in (style.FORWARD, style.BACKWARD):
            words = [f"{look.letter} {unit}"] * (short != unit) + [look.letter + short, short]
        room = (x1 - x0) * inches - 0.03
        if text := next((w for w in words if style.text_width(w, style.SMALL - 1) <= room), ""):
            style.label(axes, (x0 + x1) / 2, y, text, look.fill, size=style.SMALL - 1, backed=bool(look.hatch))
    if ticks := [tick[:3] for tick in marks.ticks if tick[3] * inches >= 0.06]:       # on a shorter bar a tick would hide the bar
        xs, lows, highs = zip(*ticks, strict=True)
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


def _phases(axes: Axes, spans: list[tuple[str, float, float]]) -> None:
    """The phases of the first rank drawn, above the lanes."""
    left, right = axes.get_xlim()
    inches = (style.WIDTH - LEFT - RIGHT) / (right - left)
    for phase, start, end in spans:
        axes.axvline(start, color="#777777", linewidth=0.6, linestyle=(0, (1, 2)), zorder=0)
        text = fitting(phase, (end - start) * inches, style.SMALL)
        axes.text((start + end) / 2, 1.0, text, transform=axes.get_xaxis_transform(), ha="center", va="bottom", fontsize=style.SMALL,
                  color="#333333")


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
