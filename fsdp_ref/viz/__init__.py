"""Pictures of a ledger: pure functions, ledger in, `Picture` (figure, text alternative, table) out.

Every picture is drawn from what was recorded and from nothing else. This part must never import the engine, start a collective,
touch matplotlib's global state (pyplot), or show a number in a figure that is not also in its table.

    shard_map           who holds which rows of which parameter
    held_by_stage       who holds parameter, gradient and optimizer state, one column a strategy
    step_timeline       what every rank did during one step, and how much communication was exposed
    wire_by_stage       bytes a rank sends in one step, one bar a strategy
    memory_over_step    which bytes were alive during one step, one panel per strategy
    memory_by_rank      the same, one panel a rank, with capacity and prediction
    waterfall           from a prediction (or the books) to the measurement, the rest named
    weight_lifetimes    from when to when each whole weight is alive
    ring                a ring collective step by step, sums and bytes
    checkpoint_map      which file holds which rows, and who reads them
    resume_strip        the loss before, at and after a crash, and what it differs by
    pipeline_grid       a pipeline schedule and its bubble

Collectives' numbers come from `rank_times`; what a reader must beware of (a rank missing, clocks apart) from `notes`.
"""

from .checkpoints import Piece, SavedTensor, checkpoint_map
from .held import held_by_stage
from .lifetimes import weight_lifetimes
from .memory import memory_over_step
from .memory_ranks import memory_by_rank
from .notes import notes
from .overlap import RankTimes, rank_times
from .picture import Picture
from .pipeline import Box, pipeline_grid
from .resume import resume_strip
from .ring import ring
from .shards import shard_map
from .timeline import step_timeline
from .waterfall import peak_waterfall, waterfall
from .wire import wire_by_stage

__all__ = ["Box", "Picture", "Piece", "RankTimes", "SavedTensor", "checkpoint_map", "held_by_stage", "memory_by_rank", "memory_over_step",
           "notes", "peak_waterfall", "pipeline_grid", "rank_times", "resume_strip", "ring", "shard_map", "step_timeline", "waterfall",
           "weight_lifetimes", "wire_by_stage"]
