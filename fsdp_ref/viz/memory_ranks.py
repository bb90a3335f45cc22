"""Memory over one step on every rank: small multiples with the same axes, the capacity, the prediction dashed, the measured peak labelled.

The areas are those of memory.py. This module must never draw a prediction as if it had been measured: it is a line, and it is dashed.
"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..errors import ConfigError
from ..garbage import uncollected
from ..ledger import Category, Ledger
from . import style
from .memory import Curve, curve_of, draw_panel
from .notes import in_words, notes
from .picture import Picture
from .units import Unit, byte_unit, percent, time_unit

RANK_LIMIT = 8
DASHED = (0, (4, 2))


@uncollected()
def memory_by_rank(ledger: Ledger, *, capacity: int | None = None, predicted: Ledger | None = None,
                   ranks: list[int] | None = None) -> Picture:
    """Memory by category over one step, one panel a rank.

    Args:
        ledger: the merged ledger of one step.
        capacity: bytes a device has; drawn as a line, and panels that cross it are named.
        predicted: a ledger of the same step that was computed, not run; its total is drawn dashed.
        ranks: the ranks to draw (default: the first 8). The table has all.

    Raises:
        FsdpRefError: a ledger has no allocations.
        ConfigError: `capacity` is not positive, or a rank is not in the ledger.
    """
    if capacity is not None and capacity <= 0:
        raise ConfigError(f"the capacity {capacity} is no number of bytes; give the bytes a device has")
    everyone = sorted({row.rank for row in ledger.allocations}) or [0]
    chosen = everyone[:RANK_LIMIT] if ranks is None else list(ranks)
    curves = {rank: curve_of("measured", ledger, rank) for rank in dict.fromkeys([*everyone, *chosen])}
    foreseen = {} if predicted is None else {rank: curve_of("predicted", predicted, rank) for rank in everyone
                                             if any(row.rank == rank for row in predicted.allocations)}
    peaks = [curve.peak for curve in (*curves.values(), *foreseen.values())]
    size = byte_unit(max([*peaks, capacity or 0]))
    heading = f"Memory over one step on {len(everyone)} rank{'s' * (len(everyone) > 1)}"
    rows = [{"rank": rank, f"peak {size.name}": size.of(curves[rank].peak)}
            | ({f"predicted peak {size.name}": size.of(foreseen[rank].peak) if rank in foreseen else None,
                "predicted / measured %": percent(foreseen[rank].peak, curves[rank].peak) if rank in foreseen else None}
               if foreseen else {})
            | ({"of the capacity %": percent(curves[rank].peak, capacity)} if capacity else {}) for rank in everyone]
    said = notes(ledger)
    alt = f"{heading}, stacked by category. " + " ".join(_words(rank, curves[rank], foreseen.get(rank), size, capacity) for rank in chosen)
    with style.look():
        figure = _draw({rank: curves[rank] for rank in chosen}, foreseen, size, capacity, heading, said)
    return Picture(figure, alt + in_words(said), rows, heading)


def _words(rank: int, curve: Curve, foreseen: Curve | None, size: Unit, capacity: int | None) -> str:
    text = f"Rank {rank}: peak {size.text(curve.peak)}"
    text += f", predicted {size.text(foreseen.peak)}" if foreseen else ""
    return text + (f", over the capacity of {size.text(capacity)}" if capacity and curve.peak > capacity else "") + "."


def _draw(curves: dict[int, Curve], foreseen: dict[int, Curve], size: Unit, capacity: int | None, heading: str, said: list[str]) -> Figure:
    columns = min(len(curves), 2 if len(curves) <= 4 else 4)
    lines = -(-len(curves) // columns)
    top, bottom, height, gap = 0.95 + 0.15 * len(said), 1.1, 1.55, 0.62
    total = top + bottom + lines * height + (lines - 1) * gap
    figure = style.new_figure(total)
    style.title(figure, heading, "same axes everywhere; areas: the engine's books; dashed: the prediction's total"
                if foreseen else "same axes everywhere; areas: the engine's books", said)
    width = (style.WIDTH - 0.75 - 0.15 - (columns - 1) * 0.3) / columns
    time = time_unit(max(float(curve.edges[-1]) for curve in curves.values()))
    longest = max(float(curve.edges[-1]) for curve in (*curves.values(), *foreseen.values()))
    highest = max([curve.peak for curve in (*curves.values(), *foreseen.values())] + [capacity or 0])
    for i, (rank, curve) in enumerate(curves.items()):
        line, column = divmod(i, columns)
        left, low = 0.75 + column * (width + 0.3), bottom + (lines - 1 - line) * (height + gap)
        axes = figure.add_axes((left / style.WIDTH, low / total, width / style.WIDTH, height / total))
        axes.set_xlim(0, time.of(longest))
        axes.set_ylim(0, max(size.of(highest), 1e-9) * 1.25)
        draw_panel(axes, curve, size, time, f"rank {rank}")
        _lines(axes, foreseen.get(rank), capacity, size, time.size, at_left=time.of(curve.peak_time) > axes.get_xlim()[1] / 2)
        axes.tick_params(labelleft=column == 0, labelbottom=line == lines - 1)
        if column == 0:
            axes.set_ylabel(f"bytes alive ({size.name})")
        if line == lines - 1:
            axes.set_xlabel(f"time ({time.name})")
    shown = [c for i, c in enumerate(Category) if any(curve.levels[i].any() for curve in curves.values())]
    style.key(figure, [(f"{style.CATEGORIES[c].letter}  {c}", style.CATEGORIES[c]) for c in shown], columns=4)
    return figure


def _lines(axes: Axes, foreseen: Curve | None, capacity: int | None, size: Unit, second: float, at_left: bool) -> None:
    """The prediction's total, dashed, and the capacity, named at the end where the peak is not."""
    if foreseen is not None:
        total = np.append(foreseen.total, foreseen.total[-1:]) / size.size
        axes.step(foreseen.edges / second, total, where="post", color=style.PAPER, linewidth=3, zorder=6)
        axes.step(foreseen.edges / second, total, where="post", color=style.EDGE, linewidth=1.3, linestyle=DASHED, zorder=6,
                  label="predicted")
    if capacity is not None:
        axes.axhline(size.of(capacity), color="#AA0000", linewidth=1.4, zorder=6)
        axes.text(0.01 if at_left else 0.99, size.of(capacity), f"capacity {size.text(capacity)}", ha="left" if at_left else "right",
                  va="bottom", fontsize=style.SMALL, color="#AA0000", transform=axes.get_yaxis_transform(), zorder=8)
