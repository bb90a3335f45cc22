"""From a failure in the pool to its diagnosis: what its exit statuses, tracebacks and stacks say, as evidence for the catalogue.

The kinds, their words and their advice stand in catalogue.py, the rules in diagnosis.py, which scripts use too. Nothing is read, asked or
waited for here but the text of cells that the pool remembers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from .. import diagnosis, source
from ..diagnosis import Diagnosis, Evidence, Raised, Running
from ..source import Place

if TYPE_CHECKING:
    from .report import Failure

_COLLECTIVE = "a collective"
_OURS = r"fsdp_ref/(collectives|wire|fingerprint|guard|agreement|world|meeting|witness)\.py"


def diagnose(failure: Failure) -> Diagnosis:
    """What went wrong, on which ranks, and what to do about it."""
    return diagnosis.diagnose(evidence_of(failure))


def evidence_of(failure: Failure) -> Evidence:
    """The failure as the catalogue reads it."""
    raised = {rank: Raised(name, text, place_in(trace)) for rank, (name, text, trace) in failure.errors.items()}
    running = {rank: running_of(stack, failure.cells) for rank, stack in failure.stuck.items()}
    return Evidence(raised, failure.dead, running, frozenset(failure.finished), failure.output, failure.after, failure.interrupted,
                    tuple(failure.pids))


def running_of(stack: str, cells: dict[str, str]) -> Running:
    """Where a rank is, from its stack (faulthandler's format, most recent call first). `cells`: the texts of cells by name of file."""
    frames = [Place(file, int(line), function) for file, line, function in re.findall(r'File "(.*?)", line (\d+) in (.*)', stack)]
    users = [frame for frame in frames if source.is_users(frame.file)]
    for name in {frame.file for frame in users if frame.in_cell}:
        source.learn(name, cells.get(Path(name).name, ""))
    inner = frames[: frames.index(users[0])] if users else []
    torchs = [frame.function for frame in inner if "torch/distributed/" in frame.file and frame.function != "wrapper"]
    waits = torchs[-1] if torchs else _COLLECTIVE if any(re.search(_OURS, frame.file) for frame in inner) else ""
    loop = source.loop_around(users[0]) if users and not waits else None
    return Running(source.tell(users[:1]), waits, str(loop or ""))


def place_in(trace: str) -> str:
    """`line 3 of the cell`: the innermost line of a traceback (IPython's text) that is in a cell or a file of the user's."""
    trace = re.sub(r"\x1b\[[0-9;]*m", "", trace)
    cells = re.findall(r"Cell In\[\d+\], line (\d+)(?:, in (\w+))?", trace)
    files = [(file, line) for file, line in re.findall(r"^File (\S+?):(\d+), in", trace, re.M)
             if source.is_users(str(Path(file).expanduser()))]
    if files and trace.rfind(f"{files[-1][0]}:{files[-1][1]}") > trace.rfind("Cell In["):
        return f"line {files[-1][1]} of {Path(files[-1][0]).name}"
    return f"line {cells[-1][0]} of the cell" + (f", in {cells[-1][1]}" if cells[-1][1] else "") if cells else ""
