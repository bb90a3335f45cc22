"""A checkpoint as a map: which file holds which rows of which tensor, who wrote them, and where they go when M ranks load what N saved.

For each tensor two rulers of its rows: above the N shards as they were saved, below the M shards as they are loaded, and between them a
ribbon for each stretch of rows that goes from one to the other. Takes a plain description, so this part knows no file format. This module
must never draw a ribbon for rows that no file holds: what is missing is hatched and named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from ..errors import ConfigError
from . import style
from .picture import Picture
from .units import Unit, byte_unit

LIMIT = 8
FILLS = ("#4477AA", "#CCBB44", "#228833", "#EE6677", "#66CCEE", "#AA3377", "#BBBBBB")       # by rank: Tol's palette, not that of states
SLASHED = style.Style(style.PAPER, "", style.LOST)


@dataclass(frozen=True)
class Piece:
    """Rows `start` up to (not with) `stop` of a tensor: on `rank`, in `file` (empty for what is loaded)."""

    rank: int
    start: int
    stop: int
    file: str = ""


@dataclass(frozen=True)
class SavedTensor:
    """One tensor of a checkpoint: `rows` of `row_bytes` each; its saved pieces, and the pieces that ranks want."""

    name: str
    rows: int
    row_bytes: int
    saved: tuple[Piece, ...]
    loaded: tuple[Piece, ...]


@dataclass(frozen=True)
class Read:
    """One ribbon: rows that go from a saved piece to a rank that loads them."""

    tensor: SavedTensor
    source: Piece
    target: Piece
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.tensor.row_bytes


def reads(tensor: SavedTensor) -> list[Read]:
    """What every loading rank reads of one tensor, from whichever file holds it; of rows that several files hold, from the first."""
    found = []
    for target in tensor.loaded:
        at = target.start
        for source in sorted(tensor.saved, key=lambda piece: (piece.start, piece.rank)):
            start, stop = max(at, source.start), min(target.stop, source.stop)
            if stop > start:
                found.append(Read(tensor, source, target, start, stop))
                at = stop
    return found


def checkpoint_map(tensors: Sequence[SavedTensor], *, limit: int = LIMIT) -> Picture:
    """Saved shards, loaded shards and the ribbons between them, for the first `limit` tensors; files and all tensors in the table.

    Raises:
        ConfigError: there are no tensors, or a piece lies outside its tensor.
    """
    if not tensors or limit < 1:
        raise ConfigError("a checkpoint map needs at least one tensor; give the tensors of a manifest")
    for tensor in tensors:
        if bad := [p for p in (*tensor.saved, *tensor.loaded) if not 0 <= p.start <= p.stop <= tensor.rows]:
            raise ConfigError(f"{bad[0]} lies outside {tensor.name}, which has {tensor.rows} rows; mend the description")
    every = [read for tensor in tensors for read in reads(tensor)]
    unit = byte_unit(max((read.nbytes for read in every), default=1))
    saved, loaded = ({piece.rank for tensor in tensors for piece in getattr(tensor, side)} for side in ("saved", "loaded"))
    heading = f"A checkpoint of {len(saved)} rank{'s' * (len(saved) != 1)} loaded by {len(loaded)}"
    table = [{"tensor": read.tensor.name, "file": read.source.file, "saved by rank": read.source.rank,
              "rows": f"{read.start}–{read.stop - 1}",
              "loaded by rank": read.target.rank, unit.name: unit.of(read.nbytes)} for read in every]
    moved = sum(read.nbytes for read in every if read.source.rank != read.target.rank)
    files = {piece.file for tensor in tensors for piece in tensor.saved}
    lost = [f"{tensor.name} rows {a}–{b - 1}" for tensor in tensors for a, b in _missing(tensor)]
    alt = (f"{heading}: {len(tensors)} tensors in {len(files)} files. {len(every)} reads of "
           f"{unit.text(sum(r.nbytes for r in every))} in all; {unit.text(moved)} of them go to another rank than the one that saved them."
           + (f" In no file: {'; '.join(lost[:6])}." if lost else ""))
    with style.look():
        return Picture(_draw(list(tensors[:limit]), len(tensors), saved, unit, heading, bool(lost)), alt, table, heading)


def _missing(tensor: SavedTensor) -> list[tuple[int, int]]:
    """Rows that are wanted and that no file holds."""
    gaps, at = [], 0
    for piece in sorted(tensor.saved, key=lambda piece: piece.start):
        if piece.start > at:
            gaps.append((at, piece.start))
        at = max(at, piece.stop)
    return gaps + ([(at, tensor.rows)] if at < tensor.rows else [])


def _draw(tensors: list[SavedTensor], count: int, savers: set[int], unit: Unit, heading: str, lost: bool) -> Figure:
    each, top, bottom = 0.95, 0.5, 0.4
    figure = style.new_figure(top + each * len(tensors) + bottom)
    more = f"; {count - len(tensors)} more tensors in the table" if count > len(tensors) else ""
    style.title(figure, heading, "each tensor: rows as saved (above, by rank and file), as loaded (below), ribbons for what is read" + more)
    axes = style.axes_in_inches(figure, 2.1, 0.3, top, bottom)
    axes.set_axis_off()
    axes.set_xlim(0, 1.003)
    axes.set_ylim(each * len(tensors), 0)
    width = style.WIDTH - 2.4
    fill = {rank: FILLS[i % len(FILLS)] for i, rank in enumerate(sorted(savers))}
    for i, tensor in enumerate(tensors):
        y = i * each
        axes.text(-0.02, y + 0.2, style.shorten(tensor.name, 30), ha="right", va="center", fontsize=style.SMALL, fontweight="bold")
        nbytes = unit.text(tensor.rows * tensor.row_bytes)
        axes.text(-0.02, y + 0.37, f"{tensor.rows} rows, {nbytes}", ha="right", va="center", fontsize=style.SMALL - 0.5, color="#333333")
        _strips(axes, tensor, y, width, fill)
    entries = [(f"saved by rank {rank}", style.Style(colour, "")) for rank, colour in list(fill.items())[:8]]
    style.key(figure, entries + ([("in no file", SLASHED)] if lost else []), columns=6, bottom=0.08)
    return figure


def _strips(axes: Axes, tensor: SavedTensor, y: float, width: float, fill: dict[int, str]) -> None:
    """The two rulers of one tensor and the ribbons between them."""
    high, scale = 0.2, 1 / max(1, tensor.rows)
    above, below = (y + 0.08, y + 0.08 + high), (y + 0.62, y + 0.62 + high)
    for read in reads(tensor):
        a, b = read.start * scale, read.stop * scale
        ribbon = [(a, above[1]), (b, above[1]), (b, below[0]), (a, below[0])]
        moved = read.source.rank != read.target.rank
        axes.add_collection(PolyCollection([ribbon], facecolors=fill[read.source.rank], alpha=0.45 if moved else 0.18,
                                           edgecolors=style.EDGE,
                                           linewidths=0.5, zorder=1), autolim=False)
        text = f"{read.start}–{read.stop - 1}" if read.stop - read.start > 1 else str(read.start)
        if style.text_width(text, style.SMALL - 1) < (b - a) * width:
            axes.text((a + b) / 2, (above[1] + below[0]) / 2, text, fontsize=style.SMALL - 1, ha="center", va="center", zorder=6)
    for a, b in _missing(tensor):
        style.boxes(axes, [(a * scale, b * scale, *above)], SLASHED)
    for pieces, (y0, y1), name in ((tensor.saved, above, "r{0.rank}  {0.file}"), (tensor.loaded, below, "rank {0.rank}")):
        for piece in (piece for piece in pieces if piece.stop > piece.start):
            a, b = piece.start * scale, piece.stop * scale
            colour = fill[piece.rank] if pieces is tensor.saved else "#EEEEEE"
            style.boxes(axes, [(a, b, y0, y1)], style.Style(colour, ""))
            long = name.format(piece)
            words = [long, style.shorten(long, 16), f"r{piece.rank}"]
            if text := next((w for w in words if style.text_width(w, style.SMALL - 1) < (b - a) * width - 0.04), ""):
                style.label(axes, (a + b) / 2, (y0 + y1) / 2, text, colour, size=style.SMALL - 1)
