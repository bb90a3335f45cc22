"""From what is left after a failure (exit statuses, remote errors, stacks) to one report: who failed first, and what follows.

It only reads; it must never wait, restart or signal anything. Root cause first, what other ranks raised because of it folded.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field

from ..errors import RankError

# What a collective raises when a peer is gone or never came, seen from torch itself (cells may call torch.distributed directly).
_GROUP_ERRORS = ("RankError", "DistBackendError", "DistNetworkError", "DistStoreError")
_GROUP_WORDS = ("gloo", "nccl", "Connection closed by peer", "Timed out waiting", "pair closure", "process group has not been initialized")


class RanksFailed(RankError):
    """A cell or a call failed on some rank. The message is the report; `ranks` says what happened to each, `restarted` whether the
    pool was replaced (then all variables on the ranks are gone). In a notebook the report is all that is shown."""

    def __init__(self, message: str, ranks: dict[int, str], restarted: bool = False, details: str = "") -> None:
        super().__init__(message)
        self.ranks, self.restarted, self.details = ranks, restarted, details

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
    interrupted: bool = False
    pids: list[int] = field(default_factory=list)
    output: str = ""                                                # last words of the first dead rank

    def __bool__(self) -> bool:
        return bool(self.dead or self.errors or self.stuck or self.interrupted)

    @property
    def group_broken(self) -> bool:
        """Whether the process group can no longer be used, so that the pool has to be restarted."""
        return bool(self.dead or self.stuck or self.interrupted) or any(map(is_group_error, self.errors.values()))


def is_group_error(error: tuple[str, str, str]) -> bool:
    """Whether this exception comes from a collective that failed, which may be another rank's fault."""
    name, text, _ = error
    return name in _GROUP_ERRORS or name == "RuntimeError" and any(word in text for word in _GROUP_WORDS)


def name_ranks(ranks) -> str:
    """`rank 1`, or `ranks 0, 2 and 3`."""
    names = [str(rank) for rank in sorted(ranks)]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"


def how_it_died(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unknown"
    return f"died with signal {-status} ({name})"


def where(stack: str) -> str:
    """`line 3 of the cell, in work`: the innermost frame of a stack (faulthandler's format) that is not a library's; else empty."""
    for file, line, function in re.findall(r'File "(.*?)", line (\d+) in (.*)', stack):
        if "ipykernel" in file and "site-packages" not in file or file.startswith("<ipython-input"):
            return f"line {line} of the cell" + ("" if function == "<module>" else f", in {function}")
        if "site-packages" not in file and "/lib/python" not in file and not file.startswith("<"):
            return f"line {line} of {re.split(r'[/]', file)[-1]}, in {function}"
    return ""


def trim(trace: str) -> str:
    """A traceback without the frames of installed libraries, which a learner can do nothing about."""
    blocks = trace.split("\n\n")                              # IPython puts an empty line between frames
    return "\n\n".join(block for block in blocks if "site-packages" not in block.split("\n", 1)[0])


def _places(stuck: dict[int, str]) -> str:
    """Where each of these ranks is."""
    found = {rank: where(stack) for rank, stack in sorted(stuck.items())}
    return "; ".join(f"rank {rank} is at {place}" if place else f"rank {rank} is in a library" for rank, place in found.items())


def explain(failure: Failure) -> tuple[str, dict[int, str], str]:
    """The sentence for a failure, what happened to each rank that failed, and details to show above the sentence."""
    each = {rank: f"{name}: {text}" for rank, (name, text, _) in failure.errors.items()}
    each |= {rank: f"still running after {failure.after:.0f} s" for rank in failure.stuck}
    each |= {rank: how_it_died(status) for rank, status in failure.dead.items()}
    causes, details = [], ""
    for rank, status in sorted(failure.dead.items()):
        causes.append(f"rank {rank} (pid {failure.pids[rank]}) {how_it_died(status)}")
        details = failure.output
    own = {rank: error for rank, error in sorted(failure.errors.items()) if not is_group_error(error)}
    for error in dict.fromkeys((name, text) for name, text, _ in own.values()):
        ranks = [rank for rank, (name, text, _) in own.items() if (name, text) == error]
        causes.append(f"{name_ranks(ranks)} raised {error[0]}: {error[1]}")
    if own and not details:
        details = trim(next(iter(own.values()))[2])
    if failure.interrupted:
        causes.append(f"interrupted after {failure.after:.0f} s" + (f" ({_places(failure.stuck)})" if failure.stuck else ""))
    elif failure.stuck:
        causes.append(f"{name_ranks(failure.stuck)} did not finish within {failure.after:.0f} s ({_places(failure.stuck)})")
    follow = [rank for rank in failure.errors if rank not in own]
    if follow and causes:
        causes.append(f"{name_ranks(follow)} then failed in a collective for want of the others")
    elif follow:
        name, text, trace = failure.errors[min(follow)]
        text = (text.splitlines() or [name])[0]
        causes.append(text if name == "RankError" else f"{name_ranks(follow)} waited in a collective that the others did not join, "
                      f"or joined with another size or operation ({text})")
        details = trim(trace)
    return "; ".join(causes), each, details
