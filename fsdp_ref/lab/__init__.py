"""What a notebook imports: real ranks behind `%%px`, guesses before a run, exercises, quizzes, and the project's own code.

    from fsdp_ref.lab import ask, changed, check, predict, read, start
    lab = start(ranks=4)

    check("zero1_step")                             # what to write; check("zero1_step", fn) judges it
    ask("05")                                       # the quiz of notebook 05; ask("05.q3", answer="b") without widgets
    from fsdp_ref.lab import explore                # pictures with controls; importing it also gives ledgers, shards and units pictures

Nothing else in the package imports the lab. It must never run a collective in the notebook's own process.
"""

from .code import changed, read
from .command import Training
from .predict import predict
from .quiz import ask
from .ranks import Ranks, start
from .report import RanksFailed

__all__ = ["Ranks", "RanksFailed", "Training", "ask", "changed", "check", "predict", "read", "start"]


def check(name, function=None, *, seed=None):
    """Judge an answer to the exercise `name` and note the score in the learner's progress, or show the exercise's card.

    See `fsdp_ref.lab.checks.check`, which imports torch; graders call that one, so they leave no trace in anybody's progress.
    """
    from .. import progress
    from .checks import check as judge
    report = judge(name, function, seed=seed)
    if function is not None and (note := progress.record_exercise(name, report.score, report.points)):
        print(note)
    return report
