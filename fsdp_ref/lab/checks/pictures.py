"""Expected beside actual: two grids of short labels, a line a rank; what differs is hatched and marked, not only coloured.

A grid shows who holds which piece, or which calls a rank made in which order. This module must never draw more than it is given.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from ...viz import Picture, style

PLAIN, WRONG = style.Style("#DDE7F3", ""), style.Style("#F3DDDD", "", style.LOST)
COLUMNS = 12                    # labels of a rank that are drawn


def beside(title: str, expected: Sequence[Sequence[str]], actual: Sequence[Sequence[str]]) -> Picture:
    """A picture of both grids. Ranks and columns beyond the first dozen stand in the table only."""
    world = max(len(expected), len(actual))
    rows = [_row(rank, expected, actual) for rank in range(world)]
    wrong = [row["rank"] for row in rows if row["the same"] == "no"]
    alt = (f"{title}. " + (f"Different on {'rank' if len(wrong) == 1 else 'ranks'} {', '.join(map(str, wrong))}." if wrong
                           else "The same on every rank.")
           + "".join(f" Rank {row['rank']}: expected {row['expected']}; yours {row['yours']}." for row in rows[:4]))
    columns = min(COLUMNS, max([1, *map(len, expected), *map(len, actual)]))
    with style.look():
        figure = style.new_figure(0.75 + 0.28 * world * 2 + 0.6)
        style.title(figure, title, "each line is a rank; hatched and marked with ≠: not as expected")
        height = 0.28 * world
        for top, name, grid in ((0.8, "expected", expected), (0.8 + height + 0.4, "yours", actual)):
            axes = style.axes_in_inches(figure, 1.0, 0.1, top, figure.get_size_inches()[1] - top - height)
            _grid(axes, name, grid, expected, columns, world)
    return Picture(figure, alt, rows, title)


def _row(rank: int, expected: Sequence[Sequence[str]], actual: Sequence[Sequence[str]]) -> dict:
    want, have = (list(grid[rank]) if rank < len(grid) else [] for grid in (expected, actual))
    return {"rank": rank, "expected": ", ".join(want) or "nothing", "yours": ", ".join(have) or "nothing",
            "the same": "yes" if want == have else "no"}


def _grid(axes: Axes, name: str, grid: Sequence[Sequence[str]], expected: Sequence[Sequence[str]], columns: int, world: int) -> None:
    axes.set_xlim(0, columns)
    axes.set_ylim(world, 0)
    axes.set_axis_off()
    axes.text(0, -0.12, name, fontsize=style.SMALL + 0.5, fontweight="bold", va="bottom")
    for rank in range(min(world, len(grid))):
        axes.text(-0.05, rank + 0.5, f"rank {rank}", ha="right", va="center", fontsize=style.SMALL)
        for column, label in enumerate(list(grid[rank])[:columns]):
            want = expected[rank][column] if rank < len(expected) and column < len(expected[rank]) else None
            look = PLAIN if label == want else WRONG
            style.boxes(axes, [(column + 0.03, column + 0.97, rank + 0.08, rank + 0.92)], look)
            text = style.shorten(label if label == want else f"≠ {label}", max(6, 88 // columns))
            style.label(axes, column + 0.5, rank + 0.5, text, look.fill, size=style.SMALL, backed=bool(look.hatch))
