"""The exercise `exact_resume` (notebook 11): everything that a run needs to go on with the same bits, on each rank.

The judge compares what the ranks wrote down of a run that went on and of one that was loaded, so it needs no model of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .exercise import Case, Exercise
from .finding import Finding, Picture, careful, verdicts
from .observe import Evidence
from .report import Verdict

AFTER = 4                                    # steps after the save
GOOD = {"values": "the weights come back, and the run goes on with the same bits",
        "optimizer": "Adam's moments and step count come back",
        "schedule": "the learning rate goes on where it was",
        "data": "the next batch is the one that would have come next",
        "random": "each rank's random numbers go on"}


def cases(seed: int) -> Iterator[Case]:
    """A save in the first epoch; then in the second, on more ranks."""
    for world, before, batch, start in ((2, 5, 2, 51), (3, 5, 3, seed), (2, 9, 2, seed + 1)):
        facts = {"before": before, "after": AFTER, "batch": batch, "seed": start}
        yield Case(world, f"{world} ranks, saved after {before} steps of {batch} examples", shared=facts, known=facts, limit=10.0)


@careful
def judge(case: Case, evidence: Evidence) -> list[Verdict]:
    """What is wrong: each part of the state by itself, then the run."""
    everyone = evidence.values()
    found = [finding for look in (_state, _weights, _optimizer, _schedule, _data, _random) for rank, seen in enumerate(everyone)
             for finding in look(case, rank, seen, everyone)]
    if not found:
        found = [finding for rank, seen in enumerate(everyone) for finding in _losses(case, rank, seen, everyone)]
    actual = [[f"{step['batch']} at {step['rate']:.3g}" for step in seen["resumed"]] for seen in everyone]
    expected = [[f"{step['batch']} at {step['rate']:.3g}" for step in seen["right"]] for seen in everyone]
    return verdicts(found, GOOD, Picture("examples and learning rate of the steps after the save", expected, actual))


def _state(case: Case, rank: int, seen: dict, everyone: list[dict]) -> Iterator[Finding]:
    if seen["strange"]:
        yield Finding("values", f"{seen['strange']}; save tensors, numbers, text, lists and dicts, which a file can hold", rank)
    before, after = seen["saved"], seen["held"]
    same = (torch.equal(value, after[key]) if isinstance(value, torch.Tensor) else value == after[key] for key, value in before.items())
    if not all(same):
        yield Finding("values", "saving changed the run itself (weights, optimizer, place in the data or random state)", rank)


def _weights(case: Case, rank: int, seen: dict, everyone: list[dict]) -> Iterator[Finding]:
    if not torch.equal(seen["saved"]["weights"], seen["loaded"]["weights"]):
        yield Finding("values", "the weights after loading are not those that were saved", rank, "weights")


def _optimizer(case: Case, rank: int, seen: dict, everyone: list[dict]) -> Iterator[Finding]:
    saved, loaded = seen["saved"], seen["loaded"]
    if not torch.equal(saved["moments"], loaded["moments"]):
        none = not loaded["moments"].any()
        yield Finding("optimizer", "Adam's moments are " + ("zeros after loading: they were not saved" if none else "other ones after "
                                                                                                                    "loading"),
                      rank, "exp_avg", case.known["before"])
    elif saved["count"] != loaded["count"]:
        yield Finding("optimizer", f"Adam's step count is {loaded['count']} after loading and was {saved['count']}: its bias "
                      "correction begins anew", rank, "step", case.known["before"])


def _schedule(case: Case, rank: int, seen: dict, everyone: list[dict]) -> Iterator[Finding]:
    rates = [[step["rate"] for step in steps] for steps in (seen["right"], seen["resumed"])]
    if rates[0] != rates[1]:
        at = next(index for index, pair in enumerate(zip(*rates, strict=True)) if pair[0] != pair[1])
        why = "the schedule starts afresh" if seen["loaded"]["last"] == 0 else f"the schedule stands at {seen['loaded']['last']}"
        yield Finding("schedule", f"the learning rate of step {case.known['before'] + at} is {rates[1][at]:.4g} and should be "
                                  f"{rates[0][at]:.4g}: {why} (it "
                                  f"stood at {seen['saved']['last']})", rank, "learning rate", case.known["before"] + at)


def _data(case: Case, rank: int, seen: dict, everyone: list[dict]) -> Iterator[Finding]:
    batches = [[step["batch"] for step in steps] for steps in (seen["right"], seen["resumed"])]
    if batches[0] != batches[1]:
        saved, loaded = seen["saved"], seen["loaded"]
        if (loaded["epoch"], loaded["position"]) == (0, 0):
            why = "the data is read from its beginning again"
        elif loaded["position"] == saved["position"]:
            why = f"the place is right but the epoch is {loaded['epoch']} and should be {saved['epoch']}, and each epoch is shuffled anew"
        else:
            why = f"the place in the epoch is {loaded['position']} and should be {saved['position']}"
        yield Finding("data", f"the first batch after loading is {batches[1][0]} and should be {batches[0][0]}: {why}", rank, "data",
                      case.known["before"])


def _random(case: Case, rank: int, seen: dict, everyone: list[dict]) -> Iterator[Finding]:
    state = seen["loaded"]["random"]
    if not torch.equal(state, seen["saved"]["random"]):
        other = next((each for each, theirs in enumerate(everyone) if torch.equal(state, theirs["saved"]["random"])), None)
        yield Finding("random", "the random numbers after loading are not those that would have come next: "
                      + (f"this rank has the state of rank {other}; each rank must keep its own" if other is not None else
                         "the generator's state was not restored, so dropout draws other masks"), rank, "random "
                                                                                                        "state", case.known["before"])


def _losses(case: Case, rank: int, seen: dict, everyone: list[dict]) -> Iterator[Finding]:
    pairs = [(a["loss"], b["loss"]) for a, b in zip(seen["right"], seen["resumed"], strict=True)]
    at = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    if at is not None or not torch.equal(*seen["ends"]):
        where = case.known["before"] + (at or 0)
        yield Finding("values", f"the run is not continued bit for bit: from step {where} on the losses "
                                "or weights differ", rank, "loss", where)


EXERCISE = Exercise(
    id="exact_resume", notebook="11", title="Resume with the same bits: four omissions",
    task="The function has two uses. exact_resume(run) returns the state of this rank's run as dicts and lists of tensors, numbers and "
         "text. exact_resume(run, state) puts such a state into a run that was just built, with other numbers everywhere. After it the run "
         "must go on as if nothing had happened, to the last bit. run has model, optimizer, schedule and loader; dropout draws from "
         "torch's own generator. The given version forgets four things: find them.",
    signature="def exact_resume(run, state=None):",
    points={"values": 1, "optimizer": 2, "schedule": 1, "data": 1, "random": 1, "no hang": 1},
    hints=("Go through one training step line by line. What does each line read that the line before the save has left behind?",
           "optimizer and schedule have state_dict() and load_state_dict(); the loader has two attributes; torch has get_rng_state() and "
           "set_rng_state().",
           "Four things are missing: the optimizer's moments with their step count, the schedule, the place in the data (both numbers), "
           "and this rank's own random state."),
    cases=cases, judge=judge)
