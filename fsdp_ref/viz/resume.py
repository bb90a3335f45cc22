"""What a crash cost: the loss before it, at it and after the resume, over that of a run that was not interrupted, and the difference.

An exact resume differs by zero, not by little: equality is judged on the numbers as given, bit for bit. This module must never smooth.
"""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from ..errors import ConfigError
from . import style
from .picture import Picture
from .units import figures

WHOLE, BEFORE, AFTER = "#999999", "#0072B2", "#D55E00"


def resume_strip(uninterrupted: Mapping[int, float], before: Mapping[int, float], after: Mapping[int, float], *, saved: int) -> Picture:
    """Loss by step of a run that crashed and went on, over the same run left alone; below, the difference.

    Args:
        uninterrupted, before, after: step -> loss. `before` ends at the crash, `after` begins after the step of the checkpoint.
        saved: the step of the checkpoint that `after` went on from.

    Raises:
        ConfigError: a run has no steps, or `after` shares no step with the uninterrupted run.
    """
    shared = sorted(set(uninterrupted) & set(after))
    if not uninterrupted or not before or not shared:
        raise ConfigError("a resume strip needs the losses of three runs, and steps that the resumed run shares with the uninterrupted "
                          "one; give {step: loss} for each")
    crash = max(before)
    again = [step for step in shared if step <= crash]
    differences = {step: after[step] - uninterrupted[step] for step in shared}
    largest = max(abs(value) for value in differences.values())
    equal = all(after[step] == uninterrupted[step] for step in shared)
    verdict = "yes, the difference is zero at every step" if equal else f"no, the loss differs by up to {figures(largest)}"
    verdict = f"bit-equal: {verdict}"
    heading = f"Crash after step {crash}, resumed from step {saved}"
    rows = [{"step": step, "uninterrupted": uninterrupted.get(step), "before the crash": before.get(step), "resumed": after.get(step),
             "difference": differences.get(step)} for step in sorted({*uninterrupted, *before, *after})]
    alt = (f"{heading}: loss over {len(uninterrupted)} steps. {verdict[0].upper()}{verdict[1:]}. {len(again)} "
           f"step{'s were' if len(again) != 1 else ' was'} done again.")
    with style.look():
        return Picture(_draw((uninterrupted, before, after), differences, saved, heading, verdict), alt, rows, heading)


def _draw(runs: tuple[Mapping[int, float], ...], differences: dict[int, float], saved: int, heading: str, verdict: str) -> Figure:
    uninterrupted, before, after = runs
    top, high, gap, low, bottom = 0.55, 1.75, 0.16, 0.6, 0.45
    total = top + high + gap + low + bottom
    figure = style.new_figure(total)
    style.title(figure, heading, verdict)
    axes = style.axes_in_inches(figure, 0.95, 0.3, top, total - top - high)
    below = style.axes_in_inches(figure, 0.95, 0.3, top + high + gap, bottom)
    for run, colour, look, text in ((uninterrupted, WHOLE, {"linewidth": 5}, "not interrupted"),
                                    (before, BEFORE, {"marker": "o", "markersize": 3}, "until the crash"),
                                    (after, AFTER, {"marker": "s", "markersize": 3, "linestyle": (0, (4, 1))}, "resumed")):
        steps = sorted(run)
        axes.plot(steps, [run[step] for step in steps], color=colour, label=text, **look)
    crash = max(before)
    first, last = min({*uninterrupted, *before, *after}), max({*uninterrupted, *before, *after})
    pad = max(0.5, (last - first) * 0.02)
    for each in (axes, below):
        each.set_xlim(first - pad, last + pad)
        each.axvline(crash, color=style.EDGE, linewidth=1.2)
        each.axvline(saved, color=style.EDGE, linewidth=0.8, linestyle=(0, (2, 2)))
    box = {"facecolor": style.PAPER, "edgecolor": "none", "pad": 0.8}
    late = saved > first + 0.75 * (last - first)
    axes.annotate(f"saved at {saved}", (saved, 0.04), xycoords=("data", "axes fraction"), xytext=(-3, 0), textcoords="offset points",
                  ha="right",
                  fontsize=style.SMALL, bbox=box)
    axes.annotate(f"crash after {crash}", (crash, 0.16 if late else 0.04), xycoords=("data", "axes fraction"), xytext=(-3 if late else 3,
                                                                                                                       0),
                  textcoords="offset points", ha="right" if late else "left", fontsize=style.SMALL, fontweight="bold", bbox=box)
    axes.legend(loc="upper right", framealpha=1, edgecolor="none", fontsize=style.SMALL, ncols=3)
    axes.set_ylabel("loss")
    axes.tick_params(labelbottom=False)
    steps = sorted(differences)
    below.axhline(0, color="#777777", linewidth=0.8)
    below.vlines(steps, 0, [differences[step] for step in steps], color=AFTER, linewidth=2)
    below.plot(steps, [differences[step] for step in steps], linestyle="", marker="s", markersize=3, color=AFTER)
    most = max((abs(value) for value in differences.values()), default=0)
    below.set_ylim(-(most or 1) * 1.3, (most or 1) * 1.3)
    if not most:
        below.set_yticks([0])
    below.set_ylabel("difference")
    below.set_xlabel("step")
    return figure
