"""One look for every picture: a colour, a hatch and a letter for each kind of state and each lane, and the plain axes around them.

[Note: never colour alone] Fills are Okabe and Ito's colour-blind safe palette (and one of Paul Tol's), and every mark also carries a
dark edge (WCAG 1.4.11: at least 3:1 against the page and against its own fill), a letter or a label, and, where it matters, a
hatch (WCAG 1.4.1). Slashes (////) mean "lost" everywhere: padding, waiting, exposed communication; nothing else has them.

Small letters are shards, capitals are whole tensors. This module must never touch matplotlib's global settings; `look()` sets them
for the time of one drawing.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..ledger import Category, Lane

DPI = 110
WIDTH = 8.2             # inches: 902 pixels, a notebook's width
EDGE = "#111111"
PAPER = "#ffffff"
LOST = "////"
SMALL, NORMAL, LARGE = 7.0, 8.0, 10.0       # font sizes in points


@dataclass(frozen=True)
class Style:
    """How one kind of thing is drawn. `letter` stands in the mark where there is room, and in the key."""

    fill: str
    letter: str
    hatch: str = ""


CATEGORIES: dict[Category, Style] = {
    Category.SHARDED_PARAM: Style("#0072B2", "p"),
    Category.OPTIMIZER: Style("#009E73", "o"),
    Category.SHARDED_GRAD: Style("#D55E00", "g", "||||"),
    Category.UNSHARDED_PARAM: Style("#56B4E9", "P", "...."),
    Category.UNSHARDED_GRAD: Style("#E69F00", "G", "++++"),
    Category.ALL_GATHER: Style("#F0E442", "a", "\\\\\\\\"),
    Category.REDUCE_SCATTER: Style("#CC79A7", "r", "\\\\\\\\"),
    Category.ACTIVATION: Style("#EEEEEE", "x"),
    Category.TEMPORARY: Style("#999933", "t", "oo"),
}
LANES: dict[Lane, Style] = {
    Lane.COMPUTE: Style("#0072B2", "F"),
    Lane.ALL_GATHER: Style("#F0E442", "a"),
    Lane.REDUCE_SCATTER: Style("#CC79A7", "r"),
    Lane.ALL_REDUCE: Style("#999933", "A"),
    Lane.OTHER: Style("#BBBBBB", "c"),
    Lane.SEND: Style("#66CCEE", "s"),
    Lane.WAIT: Style(PAPER, "w", LOST),
    Lane.OPTIMIZER: Style("#009E73", "o"),
    Lane.CHECKPOINT: Style("#DDDDDD", "k"),
}
FORWARD = LANES[Lane.COMPUTE]
BACKWARD = Style("#E69F00", "B")

_RC = {
    "font.family": "DejaVu Sans", "font.size": NORMAL, "axes.titlesize": LARGE, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.labelsize": NORMAL, "axes.edgecolor": "#444444", "axes.linewidth": 0.8, "xtick.labelsize": SMALL, "ytick.labelsize": SMALL,
    "axes.spines.top": False, "axes.spines.right": False, "hatch.linewidth": 0.5, "text.color": EDGE, "axes.labelcolor": EDGE,
    "axes.facecolor": PAPER, "figure.facecolor": PAPER, "savefig.facecolor": PAPER, "path.simplify": True, "text.usetex": False,
}


def look() -> contextlib.AbstractContextManager[None]:
    """matplotlib's defaults with ours on top, for one block, whatever the user has set."""
    return matplotlib.rc_context({**{key: value for key, value in matplotlib.rcParamsDefault.items() if key != "backend"}, **_RC})


def new_figure(height: float) -> Figure:
    """An empty figure of notebook width, `height` inches tall."""
    return Figure(figsize=(WIDTH, height), dpi=DPI)


def axes_in_inches(figure: Figure, left: float, right: float, top: float, bottom: float) -> Axes:
    """One axes with margins given in inches."""
    width, height = figure.get_size_inches()
    return figure.add_axes((left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height))


def title(figure: Figure, text: str, below: str = "", notes: list[str] | None = None) -> None:
    """The title at the top left, a line under it that says how to read the picture, and in red what a reader must beware of."""
    width, height = figure.get_size_inches()
    figure.text(0.1 / width, 1 - 0.08 / height, text, fontsize=LARGE, fontweight="bold", va="top", ha="left")
    figure.text(0.1 / width, 1 - 0.29 / height, below, fontsize=SMALL, va="top", ha="left", color="#333333")
    for i, note in enumerate(notes or []):
        figure.text(0.1 / width, 1 - (0.44 + 0.15 * i) / height, f"! {note}", fontsize=SMALL, va="top", ha="left", color="#AA0000",
                    fontweight="bold")


def key(figure: Figure, entries: list[tuple[str, Style]], columns: int, bottom: float = 0.05) -> None:
    """The key under the picture: a patch for each style, with its letter in the text."""
    patches = [Patch(facecolor=style.fill, edgecolor=EDGE, hatch=style.hatch, linewidth=0.6, label=text) for text, style in entries]
    width, height = figure.get_size_inches()
    figure.legend(handles=patches, loc="lower left", bbox_to_anchor=(0.02 / width, bottom / height), ncols=columns, frameon=False,
                  fontsize=SMALL, handlelength=2.2, handleheight=1.1, columnspacing=1.4, borderaxespad=0.0)


def boxes(axes: Axes, corners: list[tuple[float, float, float, float]] | np.ndarray, style: Style, *, edge: float = 0.6,
          order: float = 2) -> None:
    """Many boxes (x0, x1, y0, y1) of one style, in one artist; `edge` 0 leaves the edges out (boxes too thin to have an inside)."""
    if len(corners):
        outline = np.array(corners)[:, [[0, 2], [1, 2], [1, 3], [0, 3]]]        # (boxes, 4 corners, x and y)
        axes.add_collection(PolyCollection(outline, facecolors=style.fill, edgecolors=EDGE if edge else "none", linewidths=edge,
                                           hatch=style.hatch or None, zorder=order), autolim=False)


def label(axes: Axes, x: float, y: float, text: str, fill: str, *, size: float = SMALL, backed: bool = False, **kwargs) -> None:
    """Text centred in a mark of colour `fill`, black or white, whichever is easier to read; `backed` clears a hatch behind it."""
    box = {"facecolor": fill, "edgecolor": "none", "pad": 0.9} if backed else None
    axes.text(x, y, text, fontsize=size, ha="center", va="center_baseline", color=ink(fill), bbox=box, zorder=6, clip_on=True, **kwargs)


def text_width(text: str, size: float) -> float:
    """A generous estimate of the width of `text` in inches (DejaVu Sans is about 0.6 em a letter), without drawing it."""
    return len(text) * 0.62 * size / 72


def shorten(text: str, most: int) -> str:
    """`text` with its middle left out when it is longer than `most` letters; both ends of a parameter's name matter."""
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return f"{text[:head]}…{text[len(text) - (most - 1 - head):]}"


def luminance(colour: str) -> float:
    """Relative luminance, 0 (black) to 1 (white), as WCAG 2 defines it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """Contrast ratio of two colours, 1 (none) to 21, as WCAG 2 defines it."""
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def ink(fill: str) -> str:
    """Black or white, whichever reads better on `fill`."""
    return EDGE if contrast(EDGE, fill) >= contrast(PAPER, fill) else PAPER
