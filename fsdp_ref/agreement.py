"""Do the ranks agree? Asked before the first gather goes out, because afterwards it is too late.

Ranks that shard different models would exchange the wrong bytes, or wait for each other until the time limit. `check` compares what they
say of themselves. It goes through the store in which the ranks met, not through a collective: they may already disagree on those. Every
rank reads every fingerprint, so all raise the same error; where they differ, the lists behind them say what, and on which rank.
`check_average` asks whether the backend's AVG is a mean.
"""

from __future__ import annotations

import itertools
import json
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
import xxhash

from . import collectives, fingerprint, world
from .catalogue import ADVICE, PHRASES, Kind
from .collectives import Label
from .errors import ConfigError, RankError, WorldError

LIMIT = timedelta(seconds=60)                               # for the slowest rank, where no World says otherwise
_asked: weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count] = weakref.WeakKeyDictionary()
_averages: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()           # groups whose AVG has been tried


def digest(weights: torch.Tensor) -> str:
    """A digest of a parameter's whole starting values while calls are checked (fingerprint.checking); else, and on meta, nothing."""
    if not fingerprint.checking() or weights.is_meta or type(weights.detach()) not in (torch.Tensor, torch.nn.Parameter):
        return ""
    return xxhash.xxh3_128_hexdigest(weights.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy())


def check(lines: list[str], group: dist.ProcessGroup, weights: dict[str, str] | None = None) -> None:
    """Compare `lines`, this rank's description of its model, with those of all ranks of `group`. Every one of them must call it.

    Args:
        weights: parameter -> `digest` of the values it was sharded with, where it still has those.

    Raises:
        ConfigError: a rank differs; it names the rank, the first line that does, and what the group's first rank has there; or its first
            parameter that starts from other weights.
        RankError: a rank did not come here within the time limit.
    """
    if group.size() > 1 and dist.get_backend(group) != "fake":
        _compare(lines, group, weights or {})


def check_average(group: dist.ProcessGroup, device: torch.device) -> None:
    """Try once a group whether AVG averages on its backend. Every rank must call it.

    Raises:
        WorldError: it does not, so every gradient would be wrong by the same factor and training would go on.
    """
    if group.size() == 1 or group in _averages or dist.get_backend(group) == "fake":
        return
    numbers, mean = torch.full((2,), float(group.rank()), device=device), (group.size() - 1) / 2
    with collectives.route("library"):
        collectives.all_reduce(numbers, group, Label("check", "start")).wait()
    if numbers.tolist() != [mean, mean]:
        raise WorldError(f"AVG of 0 to {group.size() - 1} gave {numbers[0].item():g} on the backend {dist.get_backend(group)}, "
                         f"not {mean:g}: gradients would be wrong; use gloo, NCCL, or another torch")
    _averages.add(group)


def _compare(lines: list[str], group: dist.ProcessGroup, weights: dict[str, str]) -> None:
    ranks = [dist.get_global_rank(group, number) for number in range(group.size())]
    mine, here = dist.get_global_rank(group, group.rank()), world.current()
    number = next(_asked.setdefault(group, itertools.count()))
    limit = timedelta(seconds=here.timeout) if here else LIMIT
    store = dist.PrefixStore(f"fsdp_ref/agreement/{group.group_name}/{ranks[0]}/{number}",
                             world.store_of_groups())
    facts = json.dumps([lines, weights])
    store.set(f"lines/{mine}", facts)
    store.set(f"print/{mine}", xxhash.xxh3_128_hexdigest(facts.encode()))
    prints = []
    for rank in ranks:
        try:
            store.wait([f"print/{rank}"], limit)
        except (RuntimeError, ValueError) as error:
            raise RankError(f"rank {rank} did not run the first forward of this model within {limit.total_seconds():g} s, where the others "
                            "wait to compare their units; every rank must run it") from error
        prints.append(store.get(f"print/{rank}"))
    for rank, theirs in zip(ranks, prints, strict=True):
        if theirs != prints[0]:
            (lines, odd), (first, usual) = (json.loads(store.get(f"lines/{who}")) for who in (rank, ranks[0]))
            _tell(rank, ranks[0], lines, first)
            if others := [name for name in usual if odd.get(name, usual[name]) != usual[name]]:
                raise ConfigError(f"rank {rank} {PHRASES[Kind.SEED]} of {others[0]} than rank {ranks[0]}; {ADVICE[Kind.SEED]}")


def _tell(rank: int, reference: int, theirs: list[str], first: list[str]) -> None:
    """Raise if the two describe their models differently."""
    pairs = itertools.zip_longest(theirs, first, fillvalue="nothing more")
    odd, expected = next(((a, b) for a, b in pairs if a != b), ("", ""))
    if odd != expected:
        raise ConfigError(f"{PHRASES[Kind.MODEL]}: rank {rank} has {odd}, where rank {reference} has {expected}; {ADVICE[Kind.MODEL]}")
