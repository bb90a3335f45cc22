"""All or nothing across ranks: everyone does a piece of work, everyone learns how it went for all, everyone raises the same error.

Without this, one rank that cannot write would raise alone and leave the others waiting. `poll` and `agree` are collectives:
every rank calls them in the same order, with work that itself makes no collective. `group` is the process group over which they
vote (None: the default one); a save in the background has its own, for its messages must not mix with those of training.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from .. import collectives
from ..errors import CheckpointError, FsdpRefError, RankError
from .files import digest_bytes

_ADVICE = {
    errno.ENOSPC: "free some space, older checkpoints are untouched",
    errno.EDQUOT: "free some of the quota, older checkpoints are untouched",
    errno.ENOENT: "give a directory that all ranks share",
    errno.EACCES: "give a directory that you may write to",
    errno.EROFS: "give a directory that you may write to",
    errno.EEXIST: "give another directory",
    errno.ENOTDIR: "give another directory",
}
LABEL = collectives.Label(unit="checkpoint", phase="checkpoint")


@dataclass(frozen=True)
class Vote:
    """How one rank's work went: `value` if it went well, else `error`, one sentence and the fix."""

    rank: int
    value: object = None
    error: str = ""


def rank() -> int:
    """This process's number; 0 in a world of one."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def poll(work: Callable[[], object], group: dist.ProcessGroup | None = None) -> list[Vote]:
    """Run `work` here and on every other rank; returns everyone's vote, in rank order. `work` returns what JSON can carry.

    Raises:
        RankError: a rank died or never came, or the process group has been destroyed.
    """
    try:
        mine = {"value": work()}
        json.dumps(mine)
    except Exception as error:                    # whatever it is, the other ranks must hear of it
        mine = {"error": _explain(error)}
    return [Vote(rank, **vote) for rank, vote in enumerate(_gather(mine, group))]


def agree(what: str, work: Callable[[], object], group: dist.ProcessGroup | None = None) -> list:
    """As `poll`, but returns the values alone. `what` finishes the sentence "rank 1 could not ...".

    Raises:
        CheckpointError: the work failed on some rank; the same message on all, naming the rank and the cause.
    """
    votes = poll(work, group)
    if failure := describe_failure(votes):
        who, why = failure
        raise CheckpointError(f"{who} {what}: {why}")
    return [vote.value for vote in votes]


def describe_failure(votes: list[Vote]) -> tuple[str, str] | None:
    """Who failed ("rank 1 could not") and why; None when nobody did. Of several causes the first rank's is told."""
    failed = [vote for vote in votes if vote.error]
    if not failed:
        return None
    same = [vote.rank for vote in failed if vote.error == failed[0].error]
    if len(votes) == 1:
        who = "could not"
    elif len(same) == len(votes):
        who = "no rank could"
    else:
        who = (f"rank {same[0]}" if len(same) == 1 else "ranks " + ", ".join(map(str, same))) + " could not"
    return who, failed[0].error


def same_everywhere(facts: dict[str, object], group: dist.ProcessGroup | None = None) -> None:
    """Check that every rank holds the same facts; a collective. `facts`: name -> anything JSON can carry.

    Raises:
        CheckpointError: two ranks differ; the message names the fact and the ranks.
    """
    digests = {name: digest_bytes(json.dumps(value, sort_keys=True).encode()) for name, value in facts.items()}
    everyone = _gather(digests, group)
    for name in digests:
        astray = [rank for rank, theirs in enumerate(everyone) if theirs.get(name) != everyone[0].get(name)]
        if astray:
            raise CheckpointError(f"rank {astray[0]} and rank 0 disagree about {name}; every rank must give save and load the same")


def _gather(value: object, group: dist.ProcessGroup | None) -> list:
    if group is not None and not dist.is_initialized():      # without this check a thread that outlives the group would vote alone
        raise RankError("the process group was destroyed while a checkpoint was written; call wait() on what async_save returned first")
    return collectives.gather_json(value, group, LABEL)


def _explain(error: Exception) -> str:
    """One sentence without a traceback."""
    if isinstance(error, FsdpRefError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        place = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{place}; {_ADVICE.get(error.errno, 'mend the disk or use another')}"
    return f"{type(error).__name__}: {error}"
