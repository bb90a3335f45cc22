"""What a notebook imports: real ranks behind `%%px`, guesses before a run, and the project's own code.

    from fsdp_ref.lab import start, predict, changed, read
    lab = start(ranks=4)

    from fsdp_ref.lab import explore                # pictures with controls; importing it also gives ledgers, shards and units pictures

Nothing else in the package imports the lab. It must never run a collective in the notebook's own process.
"""

from .code import changed, read
from .command import Training
from .predict import predict
from .ranks import Ranks, start
from .report import RanksFailed

__all__ = ["Ranks", "RanksFailed", "Training", "changed", "predict", "read", "start"]
