"""Do all ranks have the same units and parameters? Asked once, at the root's first forward, before the first gather goes out.

Ranks that differ would exchange the wrong bytes, or wait for each other until the time limit. The question goes through the store in
which the ranks met, not through a collective: the ranks may already disagree on those. Every rank reads every fingerprint, so all raise
the same error; where they differ, the lists behind them say what, and on which rank.
"""

from __future__ import annotations

import itertools
import json
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
import xxhash

from .. import world
from ..errors import ConfigError, RankError

if TYPE_CHECKING:
    from .unit import Unit

LIMIT = timedelta(seconds=60)                               # for the slowest rank, where no World says otherwise
_asked: weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count] = weakref.WeakKeyDictionary()


def check(units: list[Unit]) -> None:
    """Compare `units`, their parameters, shapes, dtypes and options with those of all ranks of their groups.

    Raises:
        ConfigError: a rank differs; it names the rank, the first unit or parameter that does, and what rank 0 has there.
        RankError: a rank did not come here within the time limit.
    """
    for group in {id(g): g for unit in units for g in (unit.mesh.group, unit.mesh.replicas) if g is not None}.values():
        if group.size() > 1 and dist.get_backend(group) != "fake":
            _compare(units, group)


def _compare(units: list[Unit], group: dist.ProcessGroup) -> None:
    lines = [line for unit in units for line in _describe(unit)]
    number = next(_asked.setdefault(group, itertools.count()))
    here, key = world.current(), f"fsdp_ref/agreement/{group.group_name}/{dist.get_global_rank(group, 0)}/{number}"
    limit = timedelta(seconds=here.timeout) if here else LIMIT
    store = dist.PrefixStore(key, here.store if here else dist.distributed_c10d._get_default_store())
    store.set(f"lines/{group.rank()}", json.dumps(lines))
    store.set(f"print/{group.rank()}", xxhash.xxh3_128_hexdigest("\n".join(lines).encode()))
    prints = []
    for rank in range(group.size()):
        try:
            store.wait([f"print/{rank}"], limit)
        except (RuntimeError, ValueError) as error:
            raise RankError(f"rank {rank} did not run the first forward of this model within {limit.total_seconds():g} s, where the others "
                            "wait to compare their units; every rank must run it") from error
        prints.append(store.get(f"print/{rank}"))
    for rank, fingerprint in enumerate(prints):
        if fingerprint != prints[0]:
            theirs, first = (json.loads(store.get(f"lines/{who}")) for who in (rank, 0))
            pairs = itertools.zip_longest(theirs, first, fillvalue="nothing more")
            here, there = next((a, b) for a, b in pairs if a != b)
            raise ConfigError(f"the ranks shard different models: rank {rank} has {here}, where rank 0 has {there}; build the same "
                              "model and call fully_shard on the same modules in the same order on every rank")


def _describe(unit: Unit) -> list[str]:
    policy = f"{unit.policy.param_dtype}, reduced in {unit.policy.reduce_dtype}"
    head = f"unit {unit.name} ({unit.placements.name}, {len(unit.params)} parameters, computed in {policy})"
    return [head, *(f"{param.name} of shape {tuple(param.shape)} and {param.dtype} cut along dim {param.dim} in unit {unit.name}"
                    for param in unit.params)]
