"""What a notebook imports: real ranks behind `%%px`.

    from fsdp_ref.lab import start
    lab = start(ranks=4)

    from fsdp_ref.lab import explore                # pictures with controls; importing it also gives ledgers, shards and units pictures

    from fsdp_ref.lab import check                  # exercises: check("zero1_step") says what to write, check("zero1_step", fn) judges

Nothing else in the package imports the lab. It must never run a collective in the notebook's own process.
"""

from .command import Training
from .ranks import Ranks, start
from .report import RanksFailed

__all__ = ["Ranks", "RanksFailed", "Training", "check", "start"]


def check(name, function=None, *, seed=None):
    """Judge an answer to the exercise `name`, or show its card; see `fsdp_ref.lab.checks.check`, which imports torch."""
    from .checks import check as judge
    return judge(name, function, seed=seed)
