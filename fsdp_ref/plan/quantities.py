"""Numbers for people: bytes in GiB and GB, ranges, tables of text, and "did you mean". Used by every part of the planner.

[Note: GiB and GB] 1 GiB = 2^30 bytes and 1 GB = 10^9 bytes differ by 7.4 %, more than many a margin. GPUs' tools count GiB, papers and
disks GB. So bytes are always printed as both, each with its name.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence

from ..errors import ConfigError

GiB, GB = 2**30, 10**9


def both(low: float, high: float | None = None) -> str:
    """Bytes as GiB and GB (MiB and MB where there are few), a range where the ends differ. [Note: GiB and GB]

    >>> both(80e9), both(2**30, 2**31), both(2**20)
    ('74.51 GiB (80.00 GB)', '1.00-2.00 GiB (1.07-2.15 GB)', '1.00 MiB (1.05 MB)')
    """
    high = low if high is None else high
    binary, decimal, letter = (GiB, GB, "G") if high >= GiB / 10 else (2**20, 10**6, "M")
    return f"{spread(low / binary, high / binary)} {letter}iB ({spread(low / decimal, high / decimal)} {letter}B)"


def spread(low: float, high: float, digits: int = 2) -> str:
    """`low-high`, or one number where both print alike."""
    first, last = f"{low:.{digits}f}", f"{high:.{digits}f}"
    return first if first == last else f"{first}-{last}"


def seconds(value: float) -> str:
    """A duration in the unit that suits it.

    >>> seconds(0.0042), seconds(7.5), seconds(7200)
    ('4.2 ms', '7.50 s', '2.0 h')
    """
    if value < 1:
        return f"{1e3 * value:.3g} ms"
    return f"{value:.2f} s" if value < 120 else f"{value / 60:.1f} min" if value < 5400 else f"{value / 3600:.1f} h"


def table(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> str:
    """Rows of equal length as aligned text; the first row is the head. Columns in `right` are set flush right."""
    right = set(right)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) if column in right else cell.ljust(width)
                       for column, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def pick(what: str, name: str, known: Iterable[str]) -> str:
    """`name` as it is spelled in `known`, whatever its case.

    Raises:
        ConfigError: unknown; the nearest names are offered.
    """
    by_key = {_key(each): each for each in known}
    if _key(name) in by_key:
        return by_key[_key(name)]
    near = difflib.get_close_matches(_key(name), by_key, n=3, cutoff=0.4)
    offer = f"did you mean {' or '.join(by_key[key] for key in near)}?" if near else "choose one of these:"
    raise ConfigError(f"there is no {what} {name!r}; {offer} (known: {', '.join(by_key.values())})")


def _key(name: str) -> str:
    return "".join(letter for letter in str(name).lower() if letter.isalnum())


def at_least(least: float, most: float = math.inf, **values: float) -> None:
    """Refuse numbers that are absurd: not finite, below `least` or above `most`.

    Raises:
        ConfigError: naming the first one.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not least <= value <= most:
            limit = f"at least {least:g}" + (f" and at most {most:g}" if math.isfinite(most) else "")
            raise ConfigError(f"{name} is {value!r}; it must be a number, {limit}")


def whole(**values: int) -> None:
    """Refuse what is no whole number of 1 or more.

    Raises:
        ConfigError: naming the first one.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**9:
            raise ConfigError(f"{name} is {value!r}; it must be a whole number from 1 to 1000000000")
