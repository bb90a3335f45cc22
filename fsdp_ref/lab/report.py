"""From what is left after a failure (exit statuses, remote errors, stacks) to one report: who failed first, and what follows.

It only reads; it must never wait, restart or signal anything. Root cause first, what other ranks raised because of it folded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..catalogue import Kind
from ..diagnosis import Diagnosis, is_disagreement, is_group_error
from ..errors import RankError
from ..words import how_it_died
from .diagnose import diagnose


class RanksFailed(RankError):
    """A cell or a call failed on some rank. The message is the report; `diagnosis` says what it is (see diagnosis.py), `ranks` what
    happened to each rank, `restarted` whether the pool was replaced (then all variables on the ranks are gone). In a notebook the report
    is all that is shown."""

    def __init__(self, message: str, report: Report, restarted: bool = False) -> None:
        super().__init__(message)
        self.diagnosis, self.ranks, self.details, self.restarted = report.diagnosis, report.ranks, report.details, restarted

    def _render_traceback_(self) -> list[str]:
        """IPython's hook: the lines to show instead of a traceback through the kernel's own frames."""
        return [*self.details.splitlines(), *([""] if self.details else []), f"RanksFailed: {self}"]


@dataclass
class Failure:
    """What happened to a piece of work on the ranks that took part."""

    dead: dict[int, int] = field(default_factory=dict)              # rank -> exit status
    errors: dict[int, tuple[str, str, str]] = field(default_factory=dict)      # rank -> name, text and traceback of an exception
    stuck: dict[int, str] = field(default_factory=dict)             # rank -> its Python stack, most recent call first
    after: float = 0.0                                              # seconds until we stopped waiting for the stuck ones
    finished: list[int] = field(default_factory=list)               # ranks that came to the end
    interrupted: bool = False
    pids: list[int] = field(default_factory=list)
    cells: dict[str, str] = field(default_factory=dict)             # name of a cell's file, without its folder -> its text
    output: str = ""                                                # last words of the first dead rank

    def __bool__(self) -> bool:
        return bool(self.dead or self.errors or self.stuck or self.interrupted)

    @property
    def group_broken(self) -> bool:
        """Whether the process group can no longer be used, so that the pool has to be restarted."""
        return bool(self.dead or self.stuck or self.interrupted) or any(is_group_error(*error[:2]) for error in self.errors.values())

    @property
    def disagreed(self) -> bool:
        """Whether all there is to it is that the ranks were told of calls that differ, before anything was sent: then none waits."""
        told = {error[:2] for error in self.errors.values()}
        return not (self.dead or self.stuck or self.interrupted or self.finished) and len(told) == 1 and is_disagreement(*told.pop())


@dataclass(frozen=True)
class Report:
    """What is told of a failure: the diagnosis, what happened to each rank that failed, and details to show above."""

    diagnosis: Diagnosis
    ranks: dict[int, str]
    details: str


def trim(trace: str) -> str:
    """A traceback without the frames of installed libraries, which a learner can do nothing about."""
    blocks = trace.split("\n\n")                              # IPython puts an empty line between frames
    return "\n\n".join(block for block in blocks if "site-packages" not in block.split("\n", 1)[0])


def explain(failure: Failure) -> Report:
    """The diagnosis of a failure, what happened to each rank that failed, and details to show above the sentence."""
    each = {rank: f"{name}: {text}" for rank, (name, text, _) in failure.errors.items()}
    each |= {rank: f"still running after {failure.after:.0f} s" for rank in failure.stuck}
    each |= {rank: how_it_died(status) for rank, status in failure.dead.items()}
    found = diagnose(failure)
    guilty = [failure.errors[rank] for rank in found.ranks if rank in failure.errors]
    own = [error for error in guilty if not is_group_error(error[0], error[1])]
    details = failure.output if failure.dead else trim(own[0][2]) if own and found.kind not in (Kind.MODEL, Kind.SEED) else ""
    return Report(found, each, details)
