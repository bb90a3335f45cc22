"""Names that pictures share: the phases along the time axis, and short labels for units. Must never invent a phase or a unit."""

from __future__ import annotations

from ..ledger import Event, Lane
from .style import text_width

# each phase's names, long to short
NAMES = {"forward": ("forward", "fwd", "F"), "backward": ("backward", "bwd", "B"), "optimizer": ("optimizer", "opt", "O")}


def phase_of(event: Event) -> str:
    """ "forward", "backward", "optimizer", or "" for another event."""
    if event.lane == Lane.OPTIMIZER:
        return "optimizer"
    return next((name for name in (event.name, event.phase) if name in NAMES), "")


def phase_spans(events: list[Event]) -> list[tuple[str, float, float]]:
    """One rank's phases in order, (name, start, end): neighbouring compute events of one phase make one span."""
    spans: list[tuple[str, float, float]] = []
    for event in sorted((e for e in events if e.lane in (Lane.COMPUTE, Lane.OPTIMIZER)), key=lambda e: (e.start, -e.end)):
        phase = phase_of(event)
        if not phase:
            continue
        if spans and spans[-1][0] == phase:
            spans[-1] = (phase, spans[-1][1], max(spans[-1][2], event.end))
        else:
            spans.append((phase, event.start, event.end))
    return spans


def fitting(phase: str, inches: float, size: float) -> str:
    """The longest name of a phase that fits into `inches` at `size` points; "" when none does."""
    return next((name for name in NAMES[phase] if text_width(name, size) <= inches), "")


def unit_labels(units: list[str]) -> dict[str, str]:
    """A label of one or two letters for each unit name: its number when no other unit has it, R for the root, else a letter.

    >>> unit_labels(["(root)", "layers.0", "layers.1", "head"])
    {'(root)': 'R', 'layers.0': '0', 'layers.1': '1', 'head': 'A'}
    """
    last = {unit: unit.rsplit(".", 1)[-1] for unit in units}
    letters = (first + second for first in ("", *"ABCDEFGHIJKLMNOPQSTUVWXYZ") for second in "ABCDEFGHIJKLMNOPQSTUVWXYZ")
    labels: dict[str, str] = {}
    for unit in units:
        if unit == "(root)":
            labels[unit] = "R"
        elif last[unit].isdigit() and list(last.values()).count(last[unit]) == 1:
            labels[unit] = last[unit]
        else:
            labels[unit] = next(letters)
    return labels
