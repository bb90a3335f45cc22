"""A cut through time: who holds what at one moment, and what every rank is doing then. Dragged along a recording it is the step, slowly.

This module must never interpolate: an allocation is alive at a moment or it is not.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from ..errors import ConfigError, FsdpRefError
from ..ledger import Category, Ledger
from . import style
from .notes import in_words, notes
from .overlap import MARK
from .picture import Picture
from .units import Unit, byte_unit, time_unit

RANK_LIMIT = 8


def held_at(ledger: Ledger, moment: float, *, unit: str | None = None) -> Picture:
    """What is alive on every rank at `moment` (seconds on the ledger's clock), by category; of one `unit` or of all.

    Raises:
        FsdpRefError: the ledger holds no allocations.
        ConfigError: the moment lies outside the recording, or no allocation belongs to `unit`.
    """
    if not ledger.allocations:
        raise FsdpRefError("the ledger holds no allocations; record a step of a model that the engine manages")
    begin, end = extent(ledger)
    if not begin <= moment <= end:
        raise ConfigError(f"the moment {moment} lies outside the recording; choose one from {begin} to {end}")
    units = list(dict.fromkeys(row.unit for row in ledger.allocations))
    if unit is not None and unit not in units:
        raise ConfigError(f"no memory of unit {unit!r} was recorded; choose one of {units}")
    rows = [row for row in ledger.allocations if unit in (None, row.unit)]
    alive = {rank: [row for row in rows if row.rank == rank and row.start <= moment and (row.end is None or moment < row.end)]
             for rank in ledger.ranks}
    held = {rank: {c: sum(row.bytes for row in of if row.category == c) for c in Category} for rank, of in alive.items()}
    size, time = byte_unit(max(ledger.peak_bytes(rank) for rank in ledger.ranks)), time_unit(end - begin)
    doing = {rank: _doing(ledger, rank, moment) for rank in ledger.ranks}
    heading = f"At {time.text(moment - begin)} of {time.text(end - begin)}" + (f": unit {unit}" if unit else "")
    table = [{"rank": rank, "doing": doing[rank], **{f"{c} {size.name}": size.of(n) for c,
                                                     n in kinds.items() if any(h[c] for h in held.values())},
              f"all {size.name}": size.of(sum(kinds.values())),
              "whole weights of": ", ".join(sorted({r.unit for r in alive[rank] if r.category == Category.UNSHARDED_PARAM})) or "–"}
             for rank, kinds in held.items()]
    said = notes(ledger)
    alt = f"{heading}. " + " ".join(f"Rank {row['rank']} holds {size.text(sum(held[row['rank']].values()))} and is {row['doing']}."
                                    for row in table[:RANK_LIMIT]) + in_words(said)
    most = max(max(ledger.peak_bytes(rank) for rank in ledger.ranks) if unit is None else max(sum(k.values()) for k in held.values()), 1)
    with style.look():
        figure = _draw(dict(list(held.items())[:RANK_LIMIT]), doing, (size, most), heading, said)
    return Picture(figure, alt, table, heading)


def extent(ledger: Ledger) -> tuple[float, float]:
    """When the recording (or window) begins and ends."""
    if ledger.end > ledger.start:
        return ledger.start, ledger.end
    moments = [m for row in (*ledger.events, *ledger.allocations) for m in (row.start, row.end) if m is not None]
    return (min(moments), max(moments)) if moments else (0.0, 0.0)


def _doing(ledger: Ledger, rank: int, moment: float) -> str:
    """The rank's events that are open at the moment, innermost compute and every transfer; "idle" when there is none."""
    open_ = [e for e in ledger.events if e.rank == rank and e.phase != MARK and e.start <= moment < e.end]
    names: dict[str, str] = {}
    for event in sorted(open_, key=lambda e: e.start):
        names[event.lane] = f"{event.name} {event.unit}".strip() if event.lane != "wait" else f"waiting for {event.name}"
    return "; ".join(names.values()) or "idle"


def _draw(held: dict[int, dict[Category, int]], doing: dict[int, str], scale: tuple[Unit, int], heading: str, said: list[str]) -> Figure:
    size, most = scale
    line, top, bottom = 0.46, 0.5 + 0.15 * len(said), 0.98
    figure = style.new_figure(top + line * len(held) + bottom)
    style.title(figure, heading, "what is alive on each rank; above each bar: what the rank is doing", said)
    axes = style.axes_in_inches(figure, 0.75, 0.85, top, bottom)
    axes.set_xlim(0, size.of(most) * 1.02)
    axes.set_ylim(len(held), 0)
    axes.set_yticks([i + 0.68 for i in range(len(held))], [f"rank {rank}" for rank in held])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"bytes alive ({size.name})")
    across = (style.WIDTH - 1.6) / (size.of(most) * 1.02)
    for i, (rank, kinds) in enumerate(held.items()):
        at = 0.0
        axes.text(0.002, i + 0.24, style.shorten(doing[rank], 105), transform=axes.get_yaxis_transform(), fontsize=style.SMALL, va="center")
        for category in Category:
            if nbytes := size.of(kinds[category]):
                look = style.CATEGORIES[category]
                style.boxes(axes, [(at, at + nbytes, i + 0.44, i + 0.92)], look)
                if nbytes * across > 0.14:
                    style.label(axes, at + nbytes / 2, i + 0.68, look.letter, look.fill, backed=bool(look.hatch), fontweight="bold")
                at += nbytes
        axes.annotate(size.text(sum(kinds.values())), (at, i + 0.68), xytext=(4, 0), textcoords="offset points", va="center",
                      fontsize=style.SMALL, fontweight="bold", annotation_clip=False)
    shown = [c for c in Category if any(kinds[c] for kinds in held.values())]
    style.key(figure, [(f"{style.CATEGORIES[c].letter}  {c}", style.CATEGORIES[c]) for c in shown], columns=4)
    return figure
