"""How ranks ended, when they are all gone: the reason in words, what was printed, which files were written.

It must never follow a link that a rank made, or believe a rank's text to be more than text.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from ...errors import WorldError
from .exercise import Case
from .observe import Evidence, Failure
from .submission import Submission

STACK = re.compile(r"Current thread 0x|Thread 0x|Fatal Python error|Stack \(most")          # where faulthandler's words begin


def finish(evidence: Evidence, submission: Submission, case: Case, statuses: list[int | None], printed: list[bytearray],
           home: Path) -> Evidence:
    """Complete the evidence: ends, places, printed text, files, and the reason when a rank did not return.

    Raises:
        WorldError: a rank ended before the answer began.
    """
    lines = submission.text.splitlines()
    for mine, status, output in zip(evidence.ranks, statuses, printed, strict=True):
        text = output.decode(errors="replace")
        place = re.search(r'File "<your answer>", line (\d+)', text)
        mine.at = lines[int(place[1]) - 1].strip() if place and 0 < int(place[1]) <= len(lines) else ""
        mine.output, mine.status = STACK.split(text)[0].strip()[-2000:], status
    if evidence.failure is None or evidence.failure.kind == "time":
        for rank, mine in enumerate(evidence.ranks):
            if not mine.ready and not mine.returned:
                said = f" ({mine.output.splitlines()[-1]})" if mine.output else ""
                raise WorldError(f"rank {rank} could not be prepared{said}; check again, and run fsdp-ref doctor if it happens twice")
        evidence.failure = _why(evidence, case) or evidence.failure
    evidence.files = files_of(home)
    return evidence


def _why(evidence: Evidence, case: Case) -> Failure | None:
    """What kept the ranks from returning, if something did."""
    for rank, mine in enumerate(evidence.ranks):
        if mine.error is not None:
            return _raised(rank, mine.error, case)
    lost = [rank for rank, mine in enumerate(evidence.ranks) if not mine.returned]
    for rank in lost:
        mine = evidence.ranks[rank]
        if mine.status == -signal.SIGXCPU:
            return Failure("time", f"rank {rank} computed without end{_at(mine.at)}", rank)
        if mine.status is not None:
            how = f"was ended by {signal.Signals(-mine.status).name}" if mine.status < 0 else f"left with status {mine.status}"
            return Failure("exit", f"rank {rank}'s process {how} before the function returned; it must return", rank)
    if not lost:
        return None
    late = min(lost, key=lambda rank: (bool(evidence.ranks[rank].waits), rank))          # who waits, waits for one that works
    if evidence.failure is None:
        return Failure("exit", f"rank {late} closed its line to the judge before the function returned", late)
    doing = f"waits for {evidence.ranks[late].waits}" if evidence.ranks[late].waits else "is still at work"
    return Failure("time", f"{evidence.failure.words}: rank {late} {doing}{_at(evidence.ranks[late].at)}", late)


def _at(code: str) -> str:
    return f", at `{code}`" if code else ""


def _raised(rank: int, error: dict, case: Case) -> Failure:
    if error["type"] == "MemoryError" or "can't allocate memory" in error["text"] or "not enough memory" in error["text"]:
        return Failure("memory", f"rank {rank} took more than the {case.memory // 2**20} MiB it may take{_at(error['code'])}", rank)
    return Failure("error", f"rank {rank} raised {error['type']}: {error['text']}{_at(error['code'])}", rank)


def files_of(home: Path, most: int = 200, largest: int = 2**22) -> dict[str, bytes]:
    """What the ranks wrote: path below the run's folder (`rank-0/...` or `shared/...`) -> bytes. What is larger than `largest` is left out,
    and so are links and what is no file."""
    found: dict[str, bytes] = {}
    for folder, _, names in os.walk(home):
        for name in sorted(names):
            path = Path(folder, name)
            try:
                opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:
                continue
            with open(opened, "rb") as file:
                if len(found) < most and path.is_file() and os.fstat(opened).st_size <= largest:
                    found[str(path.relative_to(home))] = file.read(largest)
    return found
