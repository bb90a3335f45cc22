"""Bytes on the wire by strategy: what a rank sends in one step, stacked by collective and phase, as many whole models as that is.

The bytes are those of a ring: (n-1)/n of a message for an all-gather or a reduce-scatter, twice that for an all-reduce. This module must
never add what the ledger did not see.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from matplotlib.figure import Figure

from ..errors import ConfigError, FsdpRefError
from ..ledger import Lane, Ledger
from . import style
from .picture import Picture
from .shards import item_bytes
from .units import Unit, byte_unit, figures

# kind of bar -> lane and, for all-gathers, the phase; in stacking order
PARTS = {"all-gather, forward": style.Style(style.LANES[Lane.ALL_GATHER].fill, "a"),
         "all-gather, backward": style.Style(style.LANES[Lane.ALL_GATHER].fill, "a", "\\\\\\\\"),
         "all-gather after the step": style.Style(style.LANES[Lane.ALL_GATHER].fill, "a", "...."),
         "reduce-scatter": style.LANES[Lane.REDUCE_SCATTER],
         "all-reduce": style.Style(style.LANES[Lane.ALL_REDUCE].fill, "A", "xx")}
_PHASES = {"forward": "all-gather, forward", "backward": "all-gather, backward"}


def wire_by_stage(ledgers: Mapping[str, Ledger]) -> Picture:
    """Bytes a rank sends in one step (the mean over ranks), one bar an entry of `ledgers`.

    Collectives that carry no parameter or gradient (the loss, a vote) have no unit of the model and are left out.

    Raises:
        ConfigError: `ledgers` is empty or no dict.
        FsdpRefError: a ledger holds no events.
    """
    if not isinstance(ledgers, Mapping) or not ledgers:
        raise ConfigError('wire_by_stage needs a dict from name to ledger; call wire_by_stage({"DDP": one, "ZeRO-3": other})')
    sent = {name: _sent(name, ledger) for name, ledger in ledgers.items()}
    models = {name: _model_bytes(ledger) for name, ledger in ledgers.items()}
    unit = byte_unit(max(sum(parts.values()) for parts in sent.values()))
    heading = "Bytes on the wire in one step"
    table = [{"strategy": name, **{f"{part} {unit.name}": unit.of(parts.get(part, 0.0)) for part in PARTS},
              f"all {unit.name}": unit.of(sum(parts.values())),
              "times the model": sum(parts.values()) / models[name] if models[name] else None} for name, parts in sent.items()]
    alt = f"{heading}, sent by each rank on average. " + " ".join(
        f"{name}: {unit.text(sum(parts.values()))}" + (f", {figures(sum(parts.values()) / models[name])} times the model"
                                                       if models[name] else "")
        + "." for name, parts in sent.items())
    with style.look():
        return Picture(_draw(sent, models, unit, heading), alt, table, heading)


def _sent(name: str, ledger: Ledger) -> dict[str, float]:
    if not ledger.events:
        raise FsdpRefError(f"the ledger of {name!r} holds no events; record a step (with record() as ledger: step())")
    units = {shard.unit for shard in ledger.shards}
    parts: dict[str, float] = defaultdict(float)
    for event in ledger.events:
        if event.wire_bytes and (not units or event.unit in units):
            part = event.lane if event.lane != Lane.ALL_GATHER else _PHASES.get(event.phase, "all-gather after the step")
            parts[str(part)] += event.wire_bytes
    ranks = len(ledger.ranks)
    return {part: nbytes / ranks for part, nbytes in parts.items()}


def _model_bytes(ledger: Ledger) -> int:
    """Bytes of all parameters of the model whose shards the ledger holds; 0 where there are none."""
    shapes = {(shard.unit, shard.name): math.prod(shard.shape) * item_bytes(shard.dtype) for shard in ledger.shards}
    return sum(shapes.values())


def _draw(sent: dict[str, dict[str, float]], models: dict[str, int], unit: Unit, heading: str) -> Figure:
    line, top, bottom = 0.42, 0.55, 0.95
    figure = style.new_figure(top + line * len(sent) + bottom)
    style.title(figure, heading, "sent by each rank (mean over the ranks), as in a ring; "
                                 "dotted lines: one, two and three times the model's bytes")
    axes = style.axes_in_inches(figure, 1.3, 1.35, top, bottom)
    most = unit.of(max(max(sum(parts.values()) for parts in sent.values()), 1))
    axes.set_xlim(0, most * 1.02)
    axes.set_ylim(len(sent), 0)
    axes.set_yticks([i + 0.5 for i in range(len(sent))], [style.shorten(name, 22) for name in sent], fontsize=style.NORMAL)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"bytes sent by a rank ({unit.name})")
    across = (style.WIDTH - 2.65) / (most * 1.02)
    for i, (name, parts) in enumerate(sent.items()):
        at = 0.0
        for part, look in PARTS.items():
            if size := unit.of(parts.get(part, 0.0)):
                style.boxes(axes, [(at, at + size, i + 0.14, i + 0.86)], look)
                text = unit.text(parts[part])
                if style.text_width(text, style.SMALL) + 0.05 < size * across:
                    style.label(axes, at + size / 2, i + 0.5, text, look.fill, backed=bool(look.hatch))
                at += size
        total = sum(parts.values())
        note = unit.text(total) + (f"\n{figures(total / models[name])} × model" if models[name] else "")
        axes.annotate(note, (at, i + 0.5), xytext=(4, 0), textcoords="offset points", va="center", fontsize=style.SMALL, fontweight="bold",
                      annotation_clip=False)
    if model := next((unit.of(m) for m in models.values() if m), 0):
        axes.vlines([model * k for k in (1, 2, 3) if model * k <= most * 1.02], 0, len(sent), color="#555555", linewidth=0.8,
                    linestyle=(0, (1, 2)), zorder=0)
    shown = [part for part in PARTS if any(parts.get(part) for parts in sent.values())]
    style.key(figure, [(f"{PARTS[part].letter}  {part}", PARTS[part]) for part in shown], columns=3, bottom=0.1)
    return figure
