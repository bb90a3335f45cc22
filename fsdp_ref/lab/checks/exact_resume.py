"""The exercise `exact_resume`: everything that a run needs to go on with the same bits, on each rank.

A run of a few steps is saved in the middle, goes on, and is told again from what was saved, in a run that was built with another seed. The
judge compares what the ranks wrote down of both, so it needs no model of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from .finding import Finding

PROPERTIES = ("weights", "optimizer", "schedule", "data", "random", "values", "no hang")
BEFORE, AFTER, EXAMPLES = 5, 4, 12           # steps until the save, steps after it, examples an epoch and rank
PLAIN = (torch.Tensor, int, float, str, bool, bytes, type(None))


def cases(seed: int) -> list[dict]:
    """Two worlds; the second one saves in its second epoch."""
    return [{"world": 2, "before": BEFORE, "batch": 2, "seed": 51}, {"world": 3, "before": BEFORE, "batch": 3, "seed": seed}]


class Loader:
    """Examples of one rank, in an order that each epoch shuffles anew. `epoch` and `position` say where it is."""

    def __init__(self, rank: int, batch: int, seed: int) -> None:
        self.rank, self.batch, self.seed, self.epoch, self.position = rank, batch, seed, 0, 0

    def next(self) -> list[int]:
        """The numbers of the examples of the next batch."""
        if self.position >= EXAMPLES:
            self.epoch, self.position = self.epoch + 1, 0
        order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(self.seed + 10 * self.epoch + self.rank)).tolist()
        self.position += self.batch
        return order[self.position - self.batch:self.position]


@dataclass
class Run:
    """What the student is given: see the statement."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    loader: Loader
    steps: list[dict] = field(default_factory=list)


def build(case: dict, rank: int, fresh: bool) -> Run:
    """A run at its beginning; `fresh`: the one that is to go on from what was saved, with other numbers everywhere."""
    torch.manual_seed(case["seed"] + (999 if fresh else 0))
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.25), nn.Linear(6, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    torch.manual_seed(case["seed"] + rank + (5000 if fresh else 0))             # each rank its own dropout
    return Run(model, optimizer, schedule, Loader(rank, case["batch"], case["seed"]))


def train(run: Run, steps: int) -> None:
    """Some steps of data-parallel training; what each used and gave is written down."""
    for _ in range(steps):
        rate, batch = run.optimizer.param_groups[0]["lr"], run.loader.next()
        x = torch.stack([torch.sin(torch.arange(4.0) * (number + 1) + run.loader.rank) for number in batch])
        loss = (run.model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        run.optimizer.zero_grad()
        loss.backward()
        for param in run.model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        run.optimizer.step()
        run.schedule.step()
        run.steps.append({"rate": rate, "batch": batch, "loss": loss.item()})


def facts(run: Run) -> dict:
    """What a run holds at this moment."""
    slots = [run.optimizer.state.get(param, {}) for param in run.model.parameters()]
    moments = [torch.cat([slot[name].flatten() if name in slot else torch.zeros(param.numel())
                          for slot, param in zip(slots, run.model.parameters(), strict=True)]) for name in ("exp_avg", "exp_avg_sq")]
    return {"weights": nn.utils.parameters_to_vector(run.model.parameters()).detach().clone(), "moments": torch.cat(moments),
            "count": [float(slot.get("step", 0)) for slot in slots], "last": run.schedule.last_epoch, "rate":
            run.optimizer.param_groups[0]["lr"], "epoch": run.loader.epoch, "position": run.loader.position,
            "random": torch.get_rng_state().clone()}


def run(student, case: dict, rank: int, world: int) -> dict:
    """Save, go on; then load into a fresh run and go on from there."""
    first = build(case, rank, fresh=False)
    train(first, case["before"])
    before = facts(first)
    state = student(first)
    strange = _strange(state)
    untouched = all(torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
                    for value, other in zip(before.values(), facts(first).values(), strict=True))
    state = None if strange else copy.deepcopy(state)
    train(first, AFTER)
    second = build(case, rank, fresh=True)
    if not strange:
        student(second, state)
    after = facts(second)
    train(second, AFTER)
    return {"saved": before, "loaded": after, "strange": strange, "untouched": untouched, "right": first.steps[case["before"]:],
            "resumed": second.steps, "end": [facts(first)["weights"], facts(second)["weights"]]}


def _strange(state: object, where: str = "the state") -> str:
    """What in a state no file could hold; empty when all is plain."""
    if isinstance(state, dict):
        return next((found for key, value in state.items() if (found := _strange(value, f"{where}[{key!r}]"))), "")
    if isinstance(state, list | tuple):
        return next((found for index, value in enumerate(state) if (found := _strange(value, f"{where}[{index}]"))), "")
    if state is None and where == "the state":
        return "the state is None: nothing was returned"
    return "" if isinstance(state, PLAIN) else f"{where} is an object of class {type(state).__name__}"


def judge(case: dict, evidence: list[dict]) -> list[Finding]:
    """What is wrong, the cause before what follows from it."""
    found: list[Finding] = []
    for look in (_state, _weights, _optimizer, _schedule, _data, _random, _losses):
        for rank, seen in enumerate(evidence):
            found += look(case, rank, seen, evidence)
    return found


def _state(case: dict, rank: int, seen: dict, everyone: list[dict]) -> Iterator[Finding]:
    if seen["strange"]:
        yield Finding("values", f"{seen['strange']}; save tensors, numbers, text, lists and dicts, which a file can hold", rank)
    if not seen["untouched"]:
        yield Finding("values", "saving changed the run itself (weights, optimizer, place in the data or random state)", rank)


def _weights(case: dict, rank: int, seen: dict, everyone: list[dict]) -> Iterator[Finding]:
    if not torch.equal(seen["saved"]["weights"], seen["loaded"]["weights"]):
        yield Finding("weights", "the weights after loading are not those that were saved", rank, "weights")


def _optimizer(case: dict, rank: int, seen: dict, everyone: list[dict]) -> Iterator[Finding]:
    saved, loaded = seen["saved"], seen["loaded"]
    if not torch.equal(saved["moments"], loaded["moments"]):
        none = not loaded["moments"].any()
        yield Finding("optimizer", "Adam's moments are " + ("zeros after loading: they were not saved" if none else "other ones after loading"),
                      rank, "exp_avg", case["before"])
    elif saved["count"] != loaded["count"]:
        yield Finding("optimizer", f"Adam's step count is {loaded['count'][0]:g} after loading and was {saved['count'][0]:g}: its bias "
                      "correction begins anew", rank, "step", case["before"])


def _schedule(case: dict, rank: int, seen: dict, everyone: list[dict]) -> Iterator[Finding]:
    rates = [[step["rate"] for step in steps] for steps in (seen["right"], seen["resumed"])]
    if rates[0] != rates[1]:
        at = next(index for index, pair in enumerate(zip(*rates, strict=True)) if pair[0] != pair[1])
        why = "the schedule starts afresh" if seen["loaded"]["last"] == 0 else f"the schedule stands at {seen['loaded']['last']}"
        yield Finding("schedule", f"the learning rate of step {case['before'] + at} is {rates[1][at]:.4g} and should be {rates[0][at]:.4g}: {why}"
                      f" (it stood at {seen['saved']['last']})", rank, "learning rate", case["before"] + at)


def _data(case: dict, rank: int, seen: dict, everyone: list[dict]) -> Iterator[Finding]:
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
                      case["before"])


def _random(case: dict, rank: int, seen: dict, everyone: list[dict]) -> Iterator[Finding]:
    state = seen["loaded"]["random"]
    if not torch.equal(state, seen["saved"]["random"]):
        other = next((each for each, theirs in enumerate(everyone) if torch.equal(state, theirs["saved"]["random"])), None)
        yield Finding("random", "the random numbers after loading are not those that would have come next: "
                      + (f"this rank has the state of rank {other}; each rank must keep its own" if other is not None else
                         "the generator's state was not restored, so dropout draws other masks"), rank, "random state", case["before"])


def _losses(case: dict, rank: int, seen: dict, everyone: list[dict]) -> Iterator[Finding]:
    pairs = [(a["loss"], b["loss"]) for a, b in zip(seen["right"], seen["resumed"], strict=True)]
    at = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    if at is not None or not torch.equal(*seen["end"]):
        where = case["before"] + (at or 0)
        yield Finding("values", f"the run is not continued bit for bit: from step {where} on the losses or weights differ", rank, "loss", where)
