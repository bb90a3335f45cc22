"""What pictures share: the phases along the time axis, and short labels for units. Must never invent a phase or a unit."""

from __future__ import annotations

from matplotlib.axes import Axes

from ..ledger import Event, Lane
from . import style
from .style import text_width

CLOSEST = 0.03      # inches between two lines, on average

# each phase's names, long to short
NAMES = {"forward": ("forward", "fwd", "F"), "backward": ("backward", "bwd", "B"), "optimizer": ("optimizer", "opt", "O")}


def phase_of(event: Event) -> str:
    """ "forward", "backward", "optimizer", or "" for another event."""
    if event.lane == Lane.OPTIMIZER:
        return "optimizer"
    return event.name if event.name in NAMES else event.phase if event.phase in NAMES else ""


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


def draw_lines(axes: Axes, spans: list[tuple[str, float, float]], order: float = 0) -> None:
    """A dotted line where each phase begins; the limits of the axes are set. Of so many steps that lines would make a grey area, none."""
    if len(spans) * CLOSEST <= _inches(axes):
        axes.vlines([start for _, start, _ in spans], 0, 1, transform=axes.get_xaxis_transform(), color="#666666", linewidth=0.6,
                    linestyle=(0, (1, 2)), zorder=order)


def draw_names(axes: Axes, spans: list[tuple[str, float, float]], y: float = 1.0) -> None:
    """The name of each phase that has room for it, above the axes (at `y` of their height)."""
    left, right = axes.get_xlim()
    scale = _inches(axes) / (right - left)
    for phase, start, end in spans:
        if name := fitting(phase, (end - start) * scale, style.SMALL):
            axes.text((start + end) / 2, y, name, transform=axes.get_xaxis_transform(), ha="center", va="bottom", fontsize=style.SMALL,
                      color="#333333")


def _inches(axes: Axes) -> float:
    return axes.get_position().width * style.WIDTH


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
