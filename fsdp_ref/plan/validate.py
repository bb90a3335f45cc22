"""`fsdp-ref plan validate`: predicted beside published for every table in published/, and the speed model's error over all runs."""

from __future__ import annotations

import functools

from . import checks_memory, checks_time
from .checks import Check
from .quantities import table
from .tables import read


@functools.cache
def checks() -> tuple[Check, ...]:
    """Every figure there is to compare."""
    return (*checks_memory.every(), *checks_time.every())


def failures() -> list[Check]:
    """Those that do not agree."""
    return [check for check in checks() if not check.agrees]


def report(only: str | None = None) -> str:
    """The comparison as text, table by table (`only` one of them)."""
    found = [check for check in checks() if only is None or check.table == only]
    parts = []
    for name in dict.fromkeys(check.table for check in found):
        rows = [("what", "published", "predicted", "allowed", "")]
        rows += [(check.what, f"{check.published:.6g}", f"{check.predicted:.6g}", _allowed(check), _verdict(check))
                 for check in found if check.table == name]
        parts.append(f"{name}\n  {read(name)[0]}\n\n{table(rows, right=(1, 2, 3))}")
    runs = [check for check in found if check.table == "runs"]
    if runs:
        figures = ", ".join(f"{name} {value:.2f}" for name, value in checks_time.error(runs).items())
        parts.append(f"one efficiency model for all {len(runs)} runs (speed.py: KERNELS and PASSES); predicted / published as factors: "
                     f"{figures}")
    wrong = [check for check in found if not check.agrees]
    judged = sum(check.allowed is not None for check in found)
    parts.append("\n".join([f"{judged - len(wrong)} of {judged} figures agree",
                            *(f"  differs: {check.table}, {check.what}" for check in wrong)]))
    return "\n\n".join(parts)


def _allowed(check: Check) -> str:
    return "-" if check.allowed is None else "exact" if check.allowed == 0 else f"{check.allowed:.3g}"


def _verdict(check: Check) -> str:
    return f"x {check.ratio:.2f}" if check.allowed is None else "agrees" if check.agrees else "DIFFERS"
