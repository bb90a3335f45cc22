"""The catalogue of what goes wrong between ranks: its kinds, the words by which each is told and recognised, and the advice for it.

diagnosis.py finds the kind. It must import nothing of the package, and no torch: the notebook's kernel reads it too.
"""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """What went wrong. The value is the name that graders and quizzes use."""

    MISSING = "missing rank"
    EXTRA = "extra call"
    ORDER = "swapped order"
    SIZE = "size mismatch"
    DTYPE = "dtype mismatch"
    REDUCTION = "different reduction"
    ROOT = "different root"
    OPERATION = "different operation"
    BRANCH = "rank-dependent branch"
    EXIT = "early exit"
    EXCEPTION = "exception"
    MEMORY = "out of memory"
    SIGNAL = "killed by a signal"
    ABORT = "abort in the library"
    HANDLER = "collective in a signal handler"
    SAVING = "saving or loading on some ranks only"
    MODEL = "different models"
    SEED = "different seeds"
    LOOP = "endless loop elsewhere"
    DEADLOCK = "deadlock of send and recv"
    INTERRUPT = "interrupted"
    SLOW = "not done in time"
    UNKNOWN = "unknown"


# How fingerprint.py and agreement.py say it, and how it is recognised below: one place for both.
PHRASES = {
    Kind.HANDLER: "a collective in the handler",
    Kind.SIZE: "the same call with another number of elements",
    Kind.DTYPE: "the same call with another dtype",
    Kind.REDUCTION: "the same call with another reduction",
    Kind.ROOT: "the same call with another root",
    Kind.OPERATION: "another operation on the same tensor",
    Kind.SAVING: "alone saves or loads a checkpoint",
    Kind.EXTRA: "made its last call a second time",
    Kind.BRANCH: "stands under",
    Kind.ORDER: "takes its calls in another order, or left one out",
    Kind.SEED: "starts from other weights",
    Kind.MODEL: "the ranks shard different models",
}

ADVICE = {
    Kind.MISSING: "every rank must make the same collective calls: take the call out of the branch, or let every rank come to it",
    Kind.EXTRA: "take out the call that the other ranks do not make",
    Kind.ORDER: "make the calls in the same order on every rank (a set, or a dict filled in another order, has none)",
    Kind.SIZE: "send tensors of one shape: pad the shorter one, or exchange the lengths first",
    Kind.DTYPE: "convert the tensor to one dtype on every rank before the call",
    Kind.REDUCTION: "give the same op= on every rank",
    Kind.ROOT: "give the same src= or dst= on every rank: it is the rank that sends, not the one that runs",
    Kind.OPERATION: "call the same collective on every rank",
    Kind.BRANCH: "decide it on one rank and broadcast the decision, or take the call out of the branch",
    Kind.EXIT: "let every rank leave at the same point: exchange the wish to stop (all_reduce of a flag), then stop together",
    Kind.EXCEPTION: "mend that error first: what the other ranks say follows from it",
    Kind.MEMORY: "use a smaller batch, model or number of ranks",
    Kind.SIGNAL: "look for who sent it; after SIGKILL, for memory: the system kills what takes too much",
    Kind.ABORT: "compare sizes and dtypes of the call on all ranks; with fsdp_ref.collectives.check_calls() they are compared before",
    Kind.HANDLER: "set a flag in the handler and act on it between two steps, on all ranks together",
    Kind.SAVING: "call save and load on every rank: each writes and reads its own shards",
    Kind.MODEL: "build the same model and call fully_shard on the same modules in the same order on every rank",
    Kind.SEED: "call torch.manual_seed with the same number on every rank before building the model",
    Kind.LOOP: "make sure that the loop ends on every rank after the same number of rounds",
    Kind.DEADLOCK: "let one side send first while the other receives, or use isend and irecv",
    Kind.INTERRUPT: "run it again when you are ready",
    Kind.SLOW: "if it is only slow, give it more time: %%px --limit 60, lab.run(..., timeout=60) or start(..., limit=60)",
    Kind.UNKNOWN: "look at the output of that rank",
}
