"""Numbers as people read them: the unit follows from the largest value of a picture, three figures are kept.

Bytes count in powers of 1024 (KiB, MiB, GiB), as torch's own memory figures do; time in s, ms or µs. This module must never mix the
two kinds of prefix or choose two units within one picture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """A unit and its size in the base unit (bytes or seconds)."""

    name: str
    size: float

    def of(self, value: float) -> float:
        """`value`, given in bytes or seconds, in this unit."""
        return value / self.size

    def text(self, value: float) -> str:
        """`value`, given in bytes or seconds, with three figures and the unit's name: "1.25 MiB"."""
        return f"{figures(self.of(value))} {self.name}"


BYTES = (Unit("GiB", 2**30), Unit("MiB", 2**20), Unit("KiB", 2**10), Unit("bytes", 1))
SECONDS = (Unit("s", 1.0), Unit("ms", 1e-3), Unit("µs", 1e-6))


def byte_unit(largest: float) -> Unit:
    """The largest unit in which `largest` bytes are at least 1."""
    return next((unit for unit in BYTES if abs(largest) >= unit.size), BYTES[-1])


def time_unit(largest: float) -> Unit:
    """The largest unit in which `largest` seconds are at least 1."""
    return next((unit for unit in SECONDS if abs(largest) >= unit.size), SECONDS[-1])


def figures(value: float) -> str:
    """`value` with three figures and no exponent: 0.0312, 1.25, 12.5, 1250.

    >>> figures(0.031249), figures(1.25), figures(12.54), figures(1250.4), figures(2)
    ('0.0312', '1.25', '12.5', '1250', '2')
    """
    if float(value).is_integer():
        return str(int(value))
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(part: float, whole: float) -> float | None:
    """`part` of `whole` in percent, None when there is no whole."""
    return 100 * part / whole if whole else None
