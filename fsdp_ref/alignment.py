"""The clocks of the ranks on one scale, with a bound on what is left.

Nobody leaves a barrier before everybody has entered it. Rank i enters at a_i and leaves at b_i, on its own clock, which is o_i ahead of
rank 0's. In true time every a - o lies before every b - o, so for each barrier

    a_0 <= b_i - o_i   and   a_i - o_i <= b_0      ->      a_i - b_0  <=  o_i  <=  b_i - a_0

and the narrowest of several barriers counts: o_i is the middle of what they leave, wrong by at most half its width. That is a bound, not an
estimate, as long as the clocks run equally fast between barrier and recording (a quartz clock drifts some 10 us a second).

    rank 0 in the barrier from 0.0 to 0.3, rank 1 (its clock) from 5.0 to 5.2  ->  4.7 <= o <= 5.2: 4.95, wrong by at most 0.25

Processes of one machine read one monotonic clock: where `machine` agrees and 0 is possible, the offset is 0 and so is the bound.
This module does arithmetic alone; it must never start a barrier.
"""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

Barrier = tuple[float, float]               # one rank's clock when it entered and when it left

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def machine() -> str:
    """A word that all processes of a machine have in common and that says nothing about it: a digest of the boot's number or host name."""
    try:
        name = _BOOT.read_text(encoding="ascii")
    except OSError:
        name = socket.gethostname()
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def offset(reference: list[Barrier], other: list[Barrier], same_machine: bool) -> tuple[float, float]:
    """How far `other`'s clock is ahead of `reference`'s, in seconds, and by how much that may be wrong; barrier by barrier, in order."""
    low = max(entered - left for (_, left), (entered, _) in zip(reference, other, strict=True))
    high = min(left - entered for (entered, _), (_, left) in zip(reference, other, strict=True))
    if same_machine and low <= 0 <= high:
        return 0.0, 0.0
    return (low + high) / 2, abs(high - low) / 2
