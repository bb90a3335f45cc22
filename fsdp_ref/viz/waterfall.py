"""From a prediction to the measurement in steps: one bar a term, and a last one, named as such, for what no term explains.

An estimate that hides its rest cannot be trusted; so the rest is drawn, positive or negative, and stands in the table. This module must
never spread the rest over the terms.
"""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from ..errors import ConfigError
from ..ledger import Category, Ledger
from . import style
from .memory import curve_of
from .picture import Picture
from .units import Unit, byte_unit, percent

REST = "unexplained"
_PLAIN, _SUM = style.Style("#BBBBBB", ""), style.Style("#444444", "")


def waterfall(terms: Mapping[str, int], measured: int, *, of: str = "predicted") -> Picture:
    """Bytes by term, their sum, the unexplained rest, and what was measured.

    Args:
        terms: name -> bytes, in the order of the bars. A category's name gives the bar that category's colour.
        measured: bytes, from another source than the terms (an allocator, the operating system).
        of: what the sum of the terms is called.

    Raises:
        ConfigError: there are no terms, or a number is negative.
    """
    if not terms or measured < 0 or min(terms.values()) < 0:
        raise ConfigError("a waterfall needs at least one term, and bytes that are not negative; give {name: bytes} and the measured bytes")
    total = sum(terms.values())
    unit = byte_unit(max(total, measured))
    heading = f"Memory at the peak: from {of} to measured"
    rows = [*terms.items(), (f"{of}, together", total), (REST, measured - total), ("measured", measured)]
    table = [{"term": name, unit.name: unit.of(nbytes), "of the measured %": percent(nbytes, measured)} for name, nbytes in rows]
    alt = (f"{heading}. " + ", ".join(f"{name} {unit.text(nbytes)}" for name, nbytes in terms.items() if nbytes)
           + f"; together {unit.text(total)}. Measured {unit.text(measured)}, so {unit.text(measured - total)} are unexplained.")
    with style.look():
        return Picture(_draw(rows, len(terms), unit, heading), alt, table, heading)


def peak_waterfall(ledger: Ledger, rank: int = 0, *, measured: int | None = None) -> Picture:
    """The categories at the moment of `rank`'s peak against `measured` bytes (default: what the GPU's allocator counted).

    Raises:
        FsdpRefError: the ledger has nothing of this rank.
        ConfigError: nothing was measured.
    """
    if measured is None:
        figures = ledger.meta.get("allocator")
        if not isinstance(figures, dict):
            raise ConfigError("the ledger holds no figures of a GPU's allocator; give measured=BYTES from another source")
        measured = figures["peak_allocated"]
    curve = curve_of("ledger", ledger, rank)
    at = int(curve.total.argmax())
    terms = {str(category): int(curve.levels[i, at]) for i, category in enumerate(Category) if curve.levels[i, at]}
    return waterfall(terms or {"nothing": 0}, measured, of="the ledger's books")


def _draw(rows: list[tuple[str, int]], terms: int, unit: Unit, heading: str) -> Figure:
    line, top, bottom = 0.25, 0.55, 0.5
    figure = style.new_figure(top + line * len(rows) + bottom)
    style.title(figure, heading, "each bar begins where the one above it ends; slashes: what no term explains")
    axes = style.axes_in_inches(figure, 2.0, 1.0, top, bottom)
    axes.set_xlim(0, max(unit.of(max(sum(n for _, n in rows[:terms]), rows[-1][1])), 1e-9) * 1.02)
    axes.set_ylim(len(rows), 0)
    axes.set_yticks([i + 0.5 for i in range(len(rows))], [style.shorten(name, 34) for name, _ in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"bytes ({unit.name})")
    looks = {str(category): look for category, look in style.CATEGORIES.items()}
    at = 0.0
    for i, (name, nbytes) in enumerate(rows):
        whole = i == terms or i == len(rows) - 1
        begin = 0.0 if whole else at
        end = begin + unit.of(nbytes)
        look = _SUM if whole else style.Style(style.PAPER, "", style.LOST) if i > terms else looks.get(name, _PLAIN)
        style.boxes(axes, [(min(begin, end), max(begin, end), i + 0.15, i + 0.85)], look)
        sign = "+" if i == len(rows) - 2 and nbytes > 0 else ""
        axes.annotate(sign + unit.text(nbytes), (max(begin, end), i + 0.5), xytext=(4, 0), textcoords="offset points", va="center",
                      fontsize=style.SMALL, fontweight="bold" if whole or i > terms else "normal", annotation_clip=False)
        if i + 1 < len(rows):
            axes.plot([end, end], [i + 0.85, i + 1.15], color="#555555", linewidth=0.8)
        at = end
    return figure
