"""Pictures of a ledger: pure functions, ledger in, `Picture` (figure, text alternative, table) out.

Every picture is drawn from what was recorded and from nothing else. This part must never import the engine, start a collective,
touch matplotlib's global state (pyplot), or show a number in a figure that is not also in its table.

    shard_map           who holds which rows of which parameter
    step_timeline       what every rank did during one step, and how much communication was exposed
    memory_over_step    which bytes were alive during one step, one panel per strategy
"""

from .memory import memory_over_step
from .overlap import RankTimes, rank_times
from .picture import Picture
from .shards import shard_map
from .timeline import step_timeline

__all__ = ["Picture", "RankTimes", "memory_over_step", "rank_times", "shard_map", "step_timeline"]
