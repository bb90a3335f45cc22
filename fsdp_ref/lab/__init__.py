"""What a notebook imports: real ranks behind `%%px`.

    from fsdp_ref.lab import ask, start
    lab = start(ranks=4)

    ask("05")                                       # the quiz of notebook 05; ask("05.q3", answer="b") without widgets
    from fsdp_ref.lab import explore                # pictures with controls; importing it also gives ledgers, shards and units pictures

Nothing else in the package imports the lab. It must never run a collective in the notebook's own process.
"""

from .command import Training
from .quiz import ask
from .ranks import Ranks, start
from .report import RanksFailed

__all__ = ["Ranks", "RanksFailed", "Training", "ask", "start"]
