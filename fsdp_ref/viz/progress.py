"""A run while it runs: the loss so far, and what every rank holds now. Drawn from what the ranks told last.

This module must never show a loss that no rank reported.
"""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from ..errors import FsdpRefError
from ..ledger import Category
from . import style
from .picture import Picture
from .units import Unit, byte_unit, figures

RANK_LIMIT = 8


def progress(losses: Mapping[int, float], held: Mapping[int, Mapping[str, int]]) -> Picture:
    """Loss by step, and memory by rank and category.

    Args:
        losses: step -> loss; may be empty.
        held: rank -> category -> bytes on the books now.

    Raises:
        FsdpRefError: no rank has said anything yet.
    """
    if not held:
        raise FsdpRefError("no rank has reported yet; run the training cell, with live.Reporter on the ranks")
    unit = byte_unit(max(sum(kinds.values()) for kinds in held.values()))
    step = max(losses, default=0)
    heading = f"Step {step}" + (f", loss {figures(losses[step])}" if losses else "") + f", {len(held)} ranks"
    table = [{"rank": rank, **{f"{category} {unit.name}": unit.of(kinds.get(category, 0)) for category in Category
                               if any(other.get(category) for other in held.values())},
              f"all {unit.name}": unit.of(sum(kinds.values()))} for rank, kinds in held.items()]
    alt = f"{heading}. " + " ".join(f"Rank {rank} holds {unit.text(sum(kinds.values()))}." for rank,
                                    kinds in list(held.items())[:RANK_LIMIT])
    if losses:
        alt += f" The loss went from {figures(losses[min(losses)])} to {figures(losses[step])}."
    with style.look():
        return Picture(_draw(losses, dict(list(held.items())[:RANK_LIMIT]), unit, heading), alt, table, heading)


def _draw(losses: Mapping[int, float], held: Mapping[int, Mapping[str, int]], unit: Unit, heading: str) -> Figure:
    top, line, bottom = 0.55, 0.26, 1.0
    body = max(1.3, line * len(held))
    figure = style.new_figure(top + body + bottom)
    style.title(figure, heading, "left: the loss so far; right: what each rank's books hold now")
    axes = style.axes_in_inches(figure, 0.7, 4.3, top, bottom)
    axes.plot(list(losses), list(losses.values()), color=style.FORWARD.fill, linewidth=1.4, marker="o" if len(losses) < 30 else None,
              markersize=3)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    bars = style.axes_in_inches(figure, 4.9, 0.8, top, bottom)
    most = max(sum(kinds.values()) for kinds in held.values()) or 1
    bars.set_xlim(0, unit.of(most) * 1.02)
    bars.set_ylim(len(held), 0)
    bars.set_yticks([i + 0.5 for i in range(len(held))], [f"rank {rank}" for rank in held])
    bars.tick_params(axis="y", length=0)
    bars.set_xlabel(f"bytes alive ({unit.name})")
    for i, kinds in enumerate(held.values()):
        at = 0.0
        for category in Category:
            if nbytes := unit.of(kinds.get(category, 0)):
                style.boxes(bars, [(at, at + nbytes, i + 0.12, i + 0.88)], style.CATEGORIES[category])
                at += nbytes
        bars.annotate(unit.text(sum(kinds.values())), (at, i + 0.5), xytext=(4, 0), textcoords="offset points", va="center",
                      fontsize=style.SMALL, annotation_clip=False)
    shown = [c for c in Category if any(kinds.get(c) for kinds in held.values())]
    style.key(figure, [(f"{style.CATEGORIES[c].letter}  {c}", style.CATEGORIES[c]) for c in shown], columns=4)
    return figure
