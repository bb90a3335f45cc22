"""Who holds parameter, gradient and optimizer state: the ladder side by side, one column a strategy, one line a rank, bars to scale.

The moment drawn is the one at which all three exist: when the optimizer begins (without one, the end of the recording). What is whole on a
rank has the colour of whole tensors, what is a shard that of shards. This module must never scale two bars of a figure differently.
"""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from ..errors import ConfigError, FsdpRefError
from ..ledger import Category, Lane, Ledger
from . import style
from .picture import Picture
from .units import Unit, byte_unit

KINDS = {"parameter": (Category.SHARDED_PARAM, Category.UNSHARDED_PARAM),
         "gradient": (Category.SHARDED_GRAD, Category.UNSHARDED_GRAD),
         "optimizer state": (Category.OPTIMIZER,)}
RANK_LIMIT = 8


def held_by_stage(ledgers: Mapping[str, Ledger]) -> Picture:
    """Bytes of parameter, gradient and optimizer state on every rank when the optimizer begins, one column an entry of `ledgers`.

    Raises:
        ConfigError: `ledgers` is empty or no dict.
        FsdpRefError: a ledger holds no allocations.
    """
    if not isinstance(ledgers, Mapping) or not ledgers:
        raise ConfigError('held_by_stage needs a dict from name to ledger; call held_by_stage({"DDP": one, "ZeRO-3": other})')
    held = {name: {rank: _held(ledger, rank, name) for rank in ledger.ranks} for name, ledger in ledgers.items()}
    if empty := [name for name, ranks in held.items() if not ranks]:
        raise FsdpRefError(f"the ledger of {empty[0]!r} holds no rows; record a step of a model that the engine manages")
    unit = byte_unit(max(sum(kinds.values()) for ranks in held.values() for kinds in ranks.values()))
    heading = "Who holds parameter, gradient and optimizer state"
    table = [{"strategy": name, "rank": rank,
              **{f"{kind} {unit.name}": unit.of(sum(kinds.get(c, 0) for c in of)) for kind, of in KINDS.items()},
              f"all {unit.name}": unit.of(sum(kinds.values()))} for name, ranks in held.items() for rank, kinds in ranks.items()]
    means = {name: sum(sum(kinds.values()) for kinds in ranks.values()) / len(ranks) for name, ranks in held.items()}
    alt = f"{heading}, when the optimizer begins. " + " ".join(
        f"{name}: {unit.text(mean)} a rank on average over {len(held[name])} ranks." for name, mean in means.items())
    with style.look():
        return Picture(_draw(held, unit, heading), alt, table, heading)


def _held(ledger: Ledger, rank: int, name: str) -> dict[Category, int]:
    """Bytes by category on one rank when the optimizer begins."""
    rows = [row for row in ledger.allocations if row.rank == rank]
    if not rows:
        raise FsdpRefError(f"the ledger of {name!r} holds no allocations of rank {rank}; record a step of a model that the engine manages")
    begins = [event.start for event in ledger.events if event.rank == rank and event.lane == Lane.OPTIMIZER]
    moment = begins[0] if begins else ledger.end
    return {category: sum(row.bytes for row in rows if row.category == category and row.start <= moment and (row.end is None
                                                                                                             or row.end > moment))
            for kinds in KINDS.values() for category in kinds}


def _draw(held: dict[str, dict[int, dict[Category, int]]], unit: Unit, heading: str) -> Figure:
    ranks = sorted({rank for of in held.values() for rank in of})[:RANK_LIMIT]
    line, left, top, bottom, gap = 0.17, 1.25, 0.78, 0.52, 0.14
    each = len(KINDS) * line + 0.14
    body = each * len(ranks)
    figure = style.new_figure(top + body + bottom)
    below = f"bars to one scale ({unit.name}); the lighter frame is the largest such bar of the figure"
    more = len({rank for of in held.values() for rank in of}) - len(ranks)
    style.title(figure, heading, below + (f"; {more} more ranks in the table" if more > 0 else ""))
    axes = style.axes_in_inches(figure, left, 0.15, top, bottom)
    axes.set_axis_off()
    width = style.WIDTH - left - 0.15
    column = (width - gap * (len(held) - 1)) / len(held)
    axes.set_xlim(0, width)
    axes.set_ylim(body, 0)
    most = max(sum(kinds.get(c, 0) for c in of) for ranks_ in held.values() for kinds in ranks_.values() for of in KINDS.values()) or 1
    room = column - 0.72                                       # for the number after the bar
    for i, (name, by_rank) in enumerate(held.items()):
        x = i * (column + gap)
        axes.text(x, -0.08, style.shorten(name, 24), fontweight="bold", fontsize=style.NORMAL, va="bottom")
        for j, rank in enumerate(ranks):
            for k, (kind, categories) in enumerate(KINDS.items()):
                y = j * each + k * line
                if i == 0:
                    axes.text(-0.08, y + line / 2, kind, ha="right", va="center", fontsize=style.SMALL - 0.5)
                kinds, at = by_rank.get(rank, {}), x
                style.boxes(axes, [(x, x + room, y + 0.02, y + line - 0.02)], style.Style("#F4F4F4", ""), edge=0.2, order=1)
                for category in categories:
                    if nbytes := kinds.get(category, 0):
                        style.boxes(axes, [(at, at + nbytes / most * room, y + 0.02, y + line - 0.02)], style.CATEGORIES[category])
                        at += nbytes / most * room
                total = sum(kinds.get(c, 0) for c in categories)
                axes.text(x + room + 0.05, y + line / 2, unit.text(total) if rank in by_rank else "no row", va="center",
                          fontsize=style.SMALL - 0.5)
    for j, rank in enumerate(ranks):
        axes.text(-left + 0.08, j * each + 1.5 * line, f"rank {rank}", fontweight="bold", fontsize=style.SMALL, va="center", rotation=90,
                  ha="left")
    shown = [c for kinds in KINDS.values() for c in kinds if any(k.get(c) for of in held.values() for k in of.values())]
    style.key(figure, [(f"{style.CATEGORIES[c].letter}  {c}", style.CATEGORIES[c]) for c in shown], columns=5, bottom=0.12)
    return figure
