"""Picture 1: who holds which rows of which parameter.

One line a parameter, one column a rank. Within a column the whole width is the parameter, padding included, to scale; the filled
block is what the rank holds, at the place where those rows stand in the whole. A sharded parameter therefore climbs from rank to
rank, a replicated one fills every column. This module must never leave out a parameter or a rank without saying how many.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..errors import ConfigError, FsdpRefError
from ..ledger import Category, Ledger, Shard
from . import style
from .intervals import Stretch
from .notes import in_words, notes
from .picture import Picture
from .table import Rows
from .units import Unit, byte_unit, figures

LIMIT = 16              # parameters drawn
RANK_LIMIT = 8          # ranks drawn
LINE, HEADER = 0.2, 0.22          # inches a parameter and a unit's heading take
LEFT = 2.35             # inches for the names
SHARDED = style.CATEGORIES[Category.SHARDED_PARAM]
WHOLE = style.CATEGORIES[Category.UNSHARDED_PARAM]
PADDING = style.Style(style.PAPER, "", style.LOST)
ELSEWHERE = style.Style("#EEEEEE", "")


@dataclass(frozen=True)
class Parameter:
    """One parameter and its pieces, by rank."""

    unit: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: dict[int, Shard]

    @property
    def length(self) -> int:
        """Rows of the whole parameter (slices along the dim that is cut); a scalar counts as one."""
        return self.shape[next(iter(self.pieces.values())).dim] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) // max(1, self.length) * item_bytes(self.dtype)

    @property
    def replicated(self) -> bool:
        """True when every rank holds all rows (and there is more than one)."""
        return len(self.pieces) > 1 and all(p.rows == self.length for p in self.pieces.values())

    @property
    def places(self) -> dict[int, int]:
        """The row at which each rank's block is drawn: its offset, or, for an empty shard, its place in the padded whole."""
        chunk = max(piece.padded_rows for piece in self.pieces.values())
        filled = {piece.offset for piece in self.pieces.values() if piece.rows}
        empty = [rank for rank, piece in sorted(self.pieces.items()) if not piece.rows]
        replicas = max(1, sum(piece.offset == 0 and piece.rows > 0 for piece in self.pieces.values()))
        each = max(1, len(empty) // replicas)
        return {rank: piece.offset if piece.rows else (len(filled) + empty.index(rank) % each) * chunk
                for rank, piece in self.pieces.items()}

    @property
    def extent(self) -> int:
        """Rows from the first to the last block, padding included."""
        places = self.places
        return max(1, self.length, *(places[rank] + piece.padded_rows for rank, piece in self.pieces.items()))


def item_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype named as torch names it ("torch.float32", "bfloat16", "float8_e4m3fn").

    Raises:
        FsdpRefError: the name says no size.
    """
    bits = re.search(r"\d+", dtype)
    if bits is None and not dtype.endswith("bool"):
        raise FsdpRefError(f"the ledger names a dtype {dtype!r} of unknown size; record it again with a float or integer dtype")
    return max(1, int(bits.group()) // 8) if bits else 1


def shard_map(ledger: Ledger, *, limit: int = LIMIT, ranks: list[int] | None = None) -> Picture:
    """Who holds which rows of which parameter.

    Args:
        ledger: the merged ledger of all ranks. When a parameter was cut more than once, its last shard counts.
        limit: parameters to draw; the rest is folded into one line that says how many there are and how large.
        ranks: the ranks to draw (default: the first 8; the title says when there are more).

    Raises:
        FsdpRefError: the ledger holds no shards.
        ConfigError: `limit` is less than 1, or a rank is not in the ledger.
    """
    parameters = _parameters(ledger)
    everyone = sorted({rank for parameter in parameters for rank in parameter.pieces})
    chosen = everyone[:RANK_LIMIT] if ranks is None else list(ranks)
    if limit < 1:
        raise ConfigError(f"limit {limit} leaves no parameter to draw; give 1 or more")
    if unknown := sorted(set(chosen) - set(everyone)) or not chosen:
        raise ConfigError(f"rank {unknown if chosen else 'list'} is not in the ledger; choose from {everyone}")
    shown, folded = parameters[:limit], parameters[limit:]
    unit = byte_unit(max(_held(parameters, rank)[0] for rank in everyone))
    heading = f"Who holds which rows: {len(parameters)} parameters on {len(everyone)} rank{'s' * (len(everyone) > 1)}"
    more = f"; {len(everyone) - len(chosen)} more ranks not drawn" if len(chosen) < len(everyone) else ""
    said = notes(ledger)
    with style.look():
        figure = _draw(parameters, shown, folded, (chosen, unit), heading, more, said)
    table = _table(parameters, shown, folded, chosen, unit)
    return Picture(figure, _alt(parameters, folded, everyone, unit, heading + more) + in_words(said), table, heading)


# -- numbers ------------------------------------------------------------------------------------------------------------------


def _parameters(ledger: Ledger) -> list[Parameter]:
    """The parameters in the order of their units' first appearance, each with the last shard that every rank entered."""
    if not ledger.shards:
        raise FsdpRefError("the ledger holds no shards; record a model that fully_shard or data_parallel manages"
                           " (with record() as ledger: step())")
    pieces: dict[tuple[str, str], dict[int, Shard]] = {}
    for shard in ledger.shards:
        pieces.setdefault((shard.unit, shard.name), {})[shard.rank] = shard
    units = list(dict.fromkeys(unit for unit, _ in pieces))
    found = []
    for (unit, name), by in pieces.items():
        first = next(iter(by.values()))
        found.append(Parameter(unit, name, tuple(first.shape), first.dtype, by))
    return sorted(found, key=lambda parameter: units.index(parameter.unit))


def _held(parameters: list[Parameter], rank: int) -> tuple[int, int]:
    """Bytes one rank holds: (of real rows, of padding)."""
    pieces = [(p, p.pieces[rank]) for p in parameters if rank in p.pieces]
    return sum(p.row_bytes * s.rows for p, s in pieces), sum(p.row_bytes * (s.padded_rows - s.rows) for p, s in pieces)


def _rows_text(piece: Shard | None) -> str:
    """"rows 4–7", "row 4 + 1 padding", "empty + 2 padding", "nothing"."""
    if piece is None:
        return "nothing"
    padding = piece.padded_rows - piece.rows
    last = piece.offset + piece.rows - 1
    held = "empty" if piece.rows == 0 else f"row {last}" if piece.rows == 1 else f"rows {piece.offset}–{last}"
    return held + (f" + {padding} padding" if padding else "")


def _table(parameters: list[Parameter], shown: list[Parameter], folded: list[Parameter], ranks: list[int], unit: Unit) -> Rows:
    rows: Rows = []
    for p in shown:
        rows.append({"unit": p.unit, "parameter": p.name, "shape": "×".join(map(str, p.shape)) or "scalar",
                     **{f"rank {rank}": _rows_text(p.pieces.get(rank)) for rank in ranks}})
    lines = [(f"+ {len(folded)} more parameters, {unit.name}", folded, 0)] if folded else []
    lines += [(f"all held, {unit.name}", parameters, 0), (f"all padding, {unit.name}", parameters, 1)]
    for text, group, which in lines:
        rows.append({"unit": text, "parameter": "", "shape": "", **{f"rank {rank}": unit.of(_held(group, rank)[which]) for rank in ranks}})
    return rows


def _alt(parameters: list[Parameter], folded: list[Parameter], ranks: list[int], unit: Unit, heading: str) -> str:
    held = ", ".join(f"rank {rank} {unit.text(_held(parameters, rank)[0])}" for rank in ranks)
    whole = sum(p.replicated for p in parameters)
    padding = sum(_held(parameters, rank)[1] for rank in ranks)
    empty = [f"rank {rank}: empty in {p.name}" for p in parameters for rank, s in sorted(p.pieces.items()) if not s.rows]
    text = f"{heading}. {len(parameters) - whole} are cut into shards by rows, {whole} are whole on every rank. Held: {held}."
    text += f" Padding over all ranks: {byte_unit(padding).text(padding)}."
    if empty:
        text += f" Empty shards: {'; '.join(empty[:6])}{f'; and {len(empty) - 6} more' if len(empty) > 6 else ''}."
    return text + (f" {len(folded)} parameters are folded into one line." if folded else "")


# -- drawing ------------------------------------------------------------------------------------------------------------------


def _draw(parameters: list[Parameter], shown: list[Parameter], folded: list[Parameter], columns: tuple[list[int], Unit], heading: str,
          more: str, said: list[str]) -> Figure:
    ranks, unit = columns
    units = list(dict.fromkeys(p.unit for p in shown))
    body = HEADER * len(units) + LINE * len(shown) + LINE * bool(folded) + 0.46
    top, bottom, gap = 0.72 + 0.15 * len(said), 0.34, 0.08
    figure = style.new_figure(top + body + bottom)
    style.title(figure, heading, "a column's full width is the whole parameter, padding included; the block is what that rank holds" + more,
                said)
    axes = style.axes_in_inches(figure, LEFT, 0.12, top, bottom)
    axes.set_axis_off()
    width = style.WIDTH - LEFT - 0.14
    axes.set_xlim(0, width + 0.02)                                    # room for the last edge
    axes.set_ylim(body, 0)                                            # inches, downwards
    column = (width - gap * (len(ranks) - 1)) / len(ranks)
    lefts = {rank: i * (column + gap) for i, rank in enumerate(ranks)}
    for rank, left in lefts.items():
        axes.text(left + column / 2, -0.06, f"rank {rank}", ha="center", va="bottom", fontweight="bold", fontsize=style.NORMAL)
    marks: dict[str, list] = {"frame": [], "shard": [], "whole": [], "padding": []}
    y = 0.0
    for name in units:
        axes.text(-LEFT + 0.1, y + HEADER - 0.04, style.shorten(name, 40), fontweight="bold", va="bottom", fontsize=style.SMALL + 0.5)
        y += HEADER
        for parameter in (p for p in shown if p.unit == name):
            _draw_line(axes, parameter, y, lefts, column, marks)
            y += LINE
    style.boxes(axes, marks["frame"], ELSEWHERE, edge=0.3, order=1)
    for kind, look in (("padding", PADDING), ("shard", SHARDED), ("whole", WHOLE)):
        style.boxes(axes, marks[kind], look, order=2)
    _draw_totals(axes, parameters, folded, y, lefts, column, unit)
    style.key(figure, [("rows held, a shard", SHARDED), ("rows held, the whole", WHOLE), ("padding", PADDING),
                       ("rows held elsewhere", ELSEWHERE)], columns=4, bottom=0.07)
    return figure


def _draw_line(axes: Axes, parameter: Parameter, y: float, lefts: dict[int, float], column: float, marks: dict[str, list]) -> None:
    """One parameter: its name and shape, and in each rank's column the frame, the block and the padding."""
    shape = "×".join(map(str, parameter.shape)) or "scalar"
    name = style.shorten(parameter.name.removeprefix(parameter.unit + "."), 29)
    axes.text(-LEFT + 0.2, y + LINE / 2, name, va="center", fontsize=style.SMALL)
    axes.text(-0.08, y + LINE / 2, shape, va="center", ha="right", fontsize=style.SMALL - 0.5, color="#444444")
    scale, places = column / parameter.extent, parameter.places
    y0, y1 = y + 0.025, y + LINE - 0.025
    for rank, left in lefts.items():
        marks["frame"].append((left, left + parameter.length * scale, y0, y1))
        piece = parameter.pieces.get(rank)
        if piece is None:
            continue
        begin = left + places[rank] * scale
        middle, end = begin + piece.rows * scale, begin + piece.padded_rows * scale
        if end > middle:
            marks["padding"].append((middle, end, y0, y1))
        if middle > begin:
            marks["whole" if parameter.replicated else "shard"].append((begin, middle, y0, y1))
        held = (begin, middle) if piece.rows else (begin, end)
        _label_piece(axes, rank, piece, held, (left, column), (y0 + y1) / 2, WHOLE if parameter.replicated else SHARDED)


def _label_piece(axes: Axes, rank: int, piece: Shard, block: Stretch, cell: Stretch, y: float, look: style.Style) -> None:
    """The row numbers in the block (first, last), or beside it in the cell (left, width); an empty shard is named in its cell."""
    size = style.SMALL - 1
    if piece.rows == 0:
        before, after = block[0] - cell[0] - 0.05, cell[0] + cell[1] - block[1] - 0.05
        text = next((t for t in (f"rank {rank}: empty", "empty") if style.text_width(t, size) < max(before, after)), "∅")
        x = cell[0] + 0.04 if before >= after else block[1] + 0.04
        axes.text(x, y, text, fontsize=size, va="center_baseline", ha="left", zorder=6)
        return
    last = piece.offset + piece.rows - 1
    text = f"{piece.offset}–{last}" if piece.rows > 1 else f"{last}"
    needed = style.text_width(text, size) + 0.04
    if needed - 0.04 < block[1] - block[0]:
        style.label(axes, sum(block) / 2, y, text, look.fill, size=size, backed=bool(look.hatch))
    elif needed < block[0] - cell[0]:
        axes.text(block[0] - 0.04, y, text, fontsize=size, va="center_baseline", ha="right", zorder=6)
    elif needed < cell[0] + cell[1] - block[1]:
        axes.text(block[1] + 0.04, y, text, fontsize=size, va="center_baseline", ha="left", zorder=6)


def _draw_totals(axes: Axes, parameters: list[Parameter], folded: list[Parameter], y: float, lefts: dict[int, float], column: float,
                 unit: Unit) -> None:
    """The folded parameters in one stated line, and what every rank holds in all."""
    if folded:
        axes.text(-LEFT + 0.1, y + LINE / 2, f"+ {len(folded)} more", va="center", fontsize=style.SMALL, fontweight="bold", style="italic")
        for rank, left in lefts.items():
            axes.text(left + column / 2, y + LINE / 2, unit.text(_held(folded, rank)[0]), va="center", ha="center", fontsize=style.SMALL,
                      style="italic")
        y += LINE
    axes.plot([-LEFT + 0.1, max(lefts.values()) + column], [y + 0.05, y + 0.05], color=style.EDGE, linewidth=0.7, clip_on=False)
    for i, text in enumerate(("held", "padding")):
        axes.text(-LEFT + 0.1, y + 0.18 + 0.17 * i, f"{text} ({unit.name})", va="center", fontsize=style.SMALL, fontweight="bold")
        for rank, left in lefts.items():
            axes.text(left + column / 2, y + 0.18 + 0.17 * i, figures(unit.of(_held(parameters, rank)[i])), va="center", ha="center",
                      fontsize=style.SMALL, fontweight="bold")
