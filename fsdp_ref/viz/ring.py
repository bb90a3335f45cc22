"""Ring collectives step by step: what every rank holds of every chunk after each step, with the sums, and the bytes sent so far.

    all-gather        step s: rank r sends chunk r - s to rank r + 1; after n-1 steps everybody has everything
    reduce-scatter    step s: rank r sends its sum of chunk r - s - 1, which rank r + 1 adds to its own; after n-1 steps rank r has all of
                      chunk r
    all-reduce        the second, then the first: 2(n-1) steps

(Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"; all indices modulo n.) Rank r's own part
of chunk c is the number 10 (r + 1) + c, so every sum can be checked by hand. This module must never skip a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from ..errors import ConfigError
from ..ledger import Category
from . import style
from .picture import Picture
from .units import byte_unit

KINDS = ("all-gather", "reduce-scatter", "all-reduce")
OWN, PART, DONE = (style.Style(style.CATEGORIES[c].fill, style.CATEGORIES[c].letter)             # no hatch: it would stand behind numbers
                   for c in (Category.SHARDED_PARAM, Category.REDUCE_SCATTER, Category.UNSHARDED_PARAM))
Held = tuple[tuple[frozenset[int], ...], ...]           # [rank][chunk] -> the ranks whose parts are in it; empty: nothing there


@dataclass(frozen=True)
class Step:
    """The state after one step: what is held, who sent which chunk to whom in it, and how many chunks each rank has sent so far."""

    held: Held
    sent: tuple[tuple[int, int, int], ...]              # (from, to, chunk)
    chunks_sent: int
    phase: str


def part(rank: int, chunk: int) -> int:
    """The number that rank `rank` contributes to chunk `chunk`."""
    return 10 * (rank + 1) + chunk


def ring_steps(kind: str, world: int) -> list[Step]:
    """The start and every step of a ring collective on `world` ranks.

    Raises:
        ConfigError: the kind is unknown or there are fewer than 2 ranks.
    """
    if kind not in KINDS or not 2 <= world <= 8:
        raise ConfigError(f"no ring for {kind!r} on {world} ranks; choose one of {', '.join(KINDS)} and 2 to 8 ranks")
    ranks = range(world)
    nothing: frozenset[int] = frozenset()
    if kind == "all-gather":
        held: Held = tuple(tuple(frozenset({r}) if r == c else nothing for c in ranks) for r in ranks)
    else:
        held = tuple(tuple(frozenset({r}) for _ in ranks) for r in ranks)
    steps = [Step(held, (), 0, "start")]
    if kind != "all-gather":
        for s in range(world - 1):
            steps.append(_move(steps[-1], lambda r, s=s: (r - s - 1) % world, "reduce-scatter", frozenset.union))
    if kind != "reduce-scatter":
        for s in range(world - 1):
            steps.append(_move(steps[-1], lambda r, s=s: (r - s) % world, "all-gather", lambda _, came: came))
    return steps


def _move(before: Step, chunk_of: Callable[[int], int], phase: str, take: Callable) -> Step:
    """Every rank sends one chunk to the next rank, all at once."""
    world = len(before.held)
    after = [list(row) for row in before.held]
    sent = tuple((r, (r + 1) % world, chunk_of(r)) for r in range(world))
    for source, target, chunk in sent:
        after[target][chunk] = take(before.held[target][chunk], before.held[source][chunk])
    return Step(tuple(map(tuple, after)), sent, before.chunks_sent + 1, phase)


def ring(kind: str, world: int = 4, *, nbytes: int = 4 * 2**20, step: int | None = None) -> Picture:
    """A ring collective of a message of `nbytes`, all its steps side by side, or the state after one `step` alone.

    Raises:
        ConfigError: see `ring_steps`; or there is no such step.
    """
    steps = ring_steps(kind, world)
    if step is not None and not 0 <= step < len(steps):
        raise ConfigError(f"there is no step {step}; choose 0 to {len(steps) - 1}")
    chosen = range(len(steps)) if step is None else [step]
    unit, chunk = byte_unit(nbytes), nbytes / world
    heading = f"Ring {kind} on {world} ranks" + ("" if step is None else f", step {step} of {len(steps) - 1}")
    table = [{"step": i, "phase": steps[i].phase, f"sent by each rank so far {unit.name}": unit.of(steps[i].chunks_sent * chunk),
              **{f"rank {r}": " ".join(_text(steps[i], kind, r, c) or "–" for c in range(world)) for r in range(world)}} for i in chosen]
    rounds = len(steps) - 1
    alt = (f"{heading}: a table of {world} ranks by {world} chunks for {'each step' if step is None else 'one step'}. In {rounds} "
           f"steps each rank sends {rounds} chunks of {unit.text(chunk)}, {unit.text(rounds * chunk)} in all, "
           f"which is {rounds}/{world} of the message. "
           f"Last state shown: rank 0 holds {table[-1]['rank 0']}.")
    with style.look():
        return Picture(_draw([(i, steps[i]) for i in chosen], kind, world, nbytes, heading), alt, table, heading)


def _text(step: Step, kind: str, rank: int, chunk: int) -> str:
    """The number in a cell: the part itself in an all-gather, else the sum of the parts that have come together."""
    held = step.held[rank][chunk]
    return str(sum(part(r, chunk) for r in held)) if held else ""


def _draw(steps: list[tuple[int, Step]], kind: str, world: int, nbytes: int, heading: str) -> Figure:
    columns = min(len(steps), 4 if world <= 5 else 3)
    lines = -(-len(steps) // columns)
    cell, top, bottom, gap = 0.24, 0.86, 0.46, 0.62
    height = cell * (world + 1)
    figure = style.new_figure(top + bottom + lines * height + (lines - 1) * gap)
    style.title(figure, heading, "rows: ranks; columns: chunks; in a cell the sum that is there (rank r puts 10 (r+1) + c into chunk c); "
                                 "thick edge: just arrived")
    unit = byte_unit(nbytes)
    width = (style.WIDTH - 0.3 - (columns - 1) * 0.25) / columns
    total = figure.get_size_inches()[1]
    for n, (i, step) in enumerate(steps):
        line, column = divmod(n, columns)
        left, low = 0.15 + column * (width + 0.25), bottom + (lines - 1 - line) * (height + gap)
        axes = figure.add_axes((left / style.WIDTH, low / total, width / style.WIDTH, height / total))
        axes.set_axis_off()
        axes.set_xlim(0, world + 0.7)
        axes.set_ylim(world + 1, 0)
        axes.set_title(f"step {i}: {step.phase}" if i else "start", pad=14, fontsize=style.NORMAL)
        axes.text(0, -0.12, f"sent by each rank: {unit.text(step.chunks_sent * nbytes / world)}", fontsize=style.SMALL - 0.5, va="bottom")
        _cells(axes, step, kind, world)
    entries = [("own part" if kind != "all-gather" else "own chunk", OWN)]
    entries += [("partial sum", PART)] if kind != "all-gather" else []
    entries += [("complete" if kind != "all-gather" else "chunk of another rank", DONE), ("nothing yet", style.Style(style.PAPER, ""))]
    style.key(figure, entries, columns=4, bottom=0.1)
    return figure


def _cells(axes, step: Step, kind: str, world: int) -> None:
    """One panel: headings, cells, and who sends to whom at the right."""
    arrived = {(target, chunk) for _, target, chunk in step.sent}
    for c in range(world):
        axes.text(0.7 + c + 0.5, 0.55, f"c{c}", ha="center", va="center", fontsize=style.SMALL - 0.5, color="#333333")
    for r in range(world):
        axes.text(0.6, r + 1.5, f"r{r}", ha="right", va="center", fontsize=style.SMALL, fontweight="bold")
        for c in range(world):
            held = step.held[r][c]
            whole = len(held) == (1 if kind == "all-gather" else world)
            own = held == {r} and (kind != "all-gather" or r == c)
            look = style.Style(style.PAPER, "") if not held else OWN if own else DONE if whole else PART

            style.boxes(axes, [(0.74 + c, 1.66 + c, r + 1.05, r + 1.95)], look, edge=1.8 if (r, c) in arrived else 0.5)
            if text := _text(step, kind, r, c):
                style.label(axes, 1.2 + c, r + 1.5, text, look.fill, size=style.SMALL - (0 if len(text) < 4 else 1))
