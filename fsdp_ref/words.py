"""The words that messages about ranks share: names of ranks, exit statuses, first lines. It must import nothing of the package."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 1`, or `ranks 0, 2 and 3`."""
    names = [str(rank) for rank in sorted(ranks)]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"


def ranks_in(text: str) -> list[int]:
    """The ranks that a text made by `name_ranks` begins with."""
    found = re.match(r"ranks? (\d+(?:, \d+)*)(?: and (\d+))?", text)
    return [int(rank) for rank in [*found[1].split(", "), found[2]] if rank] if found else []


def how_it_died(status: int) -> str:
    """An exit status in words: minus the signal that killed the process, else what it passed to exit."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unknown"
    return f"died with signal {-status} ({name})"


def first_line(error: BaseException) -> str:
    """What a library's error says, without the place in its source and the advice that follows."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^]]*\.(cc|cpp):\d+\]\s*(err == 0\. )?", "", line).split(". ")[0]
