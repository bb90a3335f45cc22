"""What a reader must know before trusting a picture of a ledger: a rank is missing, the recording was cut short, clocks disagree.

Each is a sentence that stands in the picture, in red, and in its words. This module must never correct a ledger.
"""

from __future__ import annotations

from collections import defaultdict

from ..ledger import Event, Lane, Ledger
from ..rows import meeting
from .units import time_unit

TOGETHER = (Lane.ALL_GATHER, Lane.REDUCE_SCATTER, Lane.ALL_REDUCE)      # nobody can finish these before everybody has come


def notes(ledger: Ledger) -> list[str]:
    """The sentences for one ledger; none for a whole recording with clocks that agree."""
    found = []
    world = ledger.meta.get("world_size")
    if type(world) is int and ledger.ranks and (missing := sorted(set(range(world)) - set(ledger.ranks))):
        listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        found.append(f"no row of rank{'s' * (len(missing) > 1)} {listed}: {len(ledger.ranks)} of {world} ranks recorded")
    if "stopped" in ledger.meta:
        found.append(f"the recording was cut short ({ledger.meta['stopped']})")
    error = ledger.meta.get("clock_error_seconds", 0.0)
    apart = clocks_apart(ledger.events)
    if apart > max(1e-3, 2 * error if isinstance(error, int | float) else 0.0):
        found.append(f"clocks of the ranks disagree by at least {time_unit(apart).text(apart)}: compare times within a rank only")
    return found


def in_words(said: list[str]) -> str:
    """The notes as the end of a picture's words."""
    return "".join(f" Note: {note}." for note in said)


def clocks_apart(events: list[Event]) -> float:
    """Seconds by which a rank seems to have left a collective before another had entered it; 0 where that never happens."""
    came: dict[tuple, list[Event]] = defaultdict(list)
    for event in events:
        if event.sequence >= 0 and event.lane in TOGETHER:
            came[meeting(event)].append(event)
    return max((max([e.start for e in them]) - min([e.end for e in them]) for key, them in came.items() if len(them) == key[-1]),
               default=0.0)
