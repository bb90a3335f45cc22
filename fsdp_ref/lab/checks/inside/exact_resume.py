"""Harness: a run is saved in the middle and goes on; a run that was built with other numbers goes on from what was saved.

The optimizer and the schedule are plain classes with torch's names: torch's own would import its compiler, seconds, in every rank. Seeds go
to the generator itself: `torch.manual_seed` reads the stack's source files, which a rank may not.
"""

import copy

import torch
from torch import nn

EXAMPLES = 12                                # of one epoch and rank
PLAIN = (torch.Tensor, int, float, str, bool, bytes, type(None))


class Adam:
    """Adam on the parameters of a model; `lr` is its learning rate."""

    def __init__(self, params, lr):
        self.params, self.lr = list(params), lr
        self.exp_avg = [torch.zeros_like(param) for param in self.params]
        self.exp_avg_sq = [torch.zeros_like(param) for param in self.params]
        self.step_count = 0

    def step(self):
        """One step, with bias correction (Kingma and Ba 2015, algorithm 1)."""
        self.step_count += 1
        with torch.no_grad():
            for param, mean, square in zip(self.params, self.exp_avg, self.exp_avg_sq, strict=True):
                mean.mul_(0.9).add_(param.grad, alpha=0.1)
                square.mul_(0.99).addcmul_(param.grad, param.grad, value=0.01)
                right = mean / (1 - 0.9**self.step_count), square / (1 - 0.99**self.step_count)
                param -= self.lr * right[0] / (right[1].sqrt() + 1e-8)

    def state_dict(self):
        """Moments, step count and learning rate."""
        return {"exp_avg": list(self.exp_avg), "exp_avg_sq": list(self.exp_avg_sq), "step_count": self.step_count, "lr": self.lr}

    def load_state_dict(self, state):
        """The inverse of `state_dict`."""
        for name in ("exp_avg", "exp_avg_sq"):
            for mine, saved in zip(getattr(self, name), state[name], strict=True):
                mine.copy_(saved)
        self.step_count, self.lr = state["step_count"], state["lr"]


class Schedule:
    """A learning rate that falls with every step: 1 / (1 + last_epoch) of the first one."""

    def __init__(self, optimizer):
        self.optimizer, self.base, self.last_epoch = optimizer, optimizer.lr, 0

    def step(self):
        """Set the rate of the next step."""
        self.last_epoch += 1
        self.optimizer.lr = self.base / (1 + self.last_epoch)

    def state_dict(self):
        """How many steps it has made."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state):
        """The inverse of `state_dict`."""
        self.last_epoch = state["last_epoch"]


class Loader:
    """Examples of one rank, in an order that each epoch shuffles anew. `epoch` and `position` say where it is."""

    def __init__(self, rank, batch, seed):
        self.rank, self.batch, self.seed, self.epoch, self.position = rank, batch, seed, 0, 0

    def next(self):
        """The numbers of the examples of the next batch."""
        if self.position >= EXAMPLES:
            self.epoch, self.position = self.epoch + 1, 0
        order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(self.seed + 10 * self.epoch + self.rank)).tolist()
        self.position += self.batch
        return order[self.position - self.batch:self.position]


class Run:
    """What the learner is given: model, optimizer, schedule, loader."""

    def __init__(self, case, rank, fresh):
        torch.random.default_generator.manual_seed(case["seed"] + (999 if fresh else 0))
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.25), nn.Linear(6, 1))
        self.optimizer = Adam(self.model.parameters(), lr=0.05)
        self.schedule = Schedule(self.optimizer)
        self.loader = Loader(rank, case["batch"], case["seed"])
        torch.random.default_generator.manual_seed(case["seed"] + rank + (5000 if fresh else 0))             # each rank its own dropout


def train(run, steps, wire):
    """Some steps of data-parallel training; what each used and gave."""
    told = []
    for _ in range(steps):
        rate, batch = run.optimizer.lr, run.loader.next()
        x = torch.stack([torch.sin(torch.arange(4.0) * (number + 1) + run.loader.rank) for number in batch])
        loss = (run.model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        run.model.zero_grad()
        loss.backward()
        for param in run.model.parameters():
            wire.all_reduce(param.grad)
            param.grad /= wire.world
        run.optimizer.step()
        run.schedule.step()
        told.append({"rate": rate, "batch": batch, "loss": loss.item()})
    return told


def facts(run):
    """What a run holds at this moment."""
    moments = [*run.optimizer.exp_avg, *run.optimizer.exp_avg_sq]
    return {"weights": nn.utils.parameters_to_vector(run.model.parameters()).detach().clone(),
            "moments": torch.cat([each.flatten() for each in moments]), "count": run.optimizer.step_count, "rate": run.optimizer.lr,
            "last": run.schedule.last_epoch, "epoch": run.loader.epoch, "position": run.loader.position,
            "random": torch.get_rng_state().clone()}


def run(function, case, rank):
    """The evidence: what both runs held when saved and loaded, and what their next steps used and gave."""
    first = Run(case, rank.rank, fresh=False)
    train(first, case["before"], rank.wire)
    saved = facts(first)
    state = function(first)
    strange, held = strange_in(state), facts(first)
    state = None if strange else copy.deepcopy(state)                               # as a file would hold it
    right = train(first, case["after"], rank.wire)
    second = Run(case, rank.rank, fresh=True)
    if not strange:
        function(second, state)
    loaded = facts(second)
    resumed = train(second, case["after"], rank.wire)
    return {"saved": saved, "held": held, "loaded": loaded, "strange": strange, "right": right, "resumed": resumed,
            "ends": [facts(first)["weights"], facts(second)["weights"]]}


def strange_in(state, where="the state"):
    """What in a state no file could hold; empty when all is plain."""
    if isinstance(state, dict):
        return next((found for key, value in state.items() if (found := strange_in(value, f"{where}[{key!r}]"))), "")
    if isinstance(state, list | tuple):
        return next((found for index, value in enumerate(state) if (found := strange_in(value, f"{where}[{index}]"))), "")
    if state is None and where == "the state":
        return "the state is None: nothing was returned"
    return "" if isinstance(state, PLAIN) else f"{where} is an object of class {type(state).__name__}"
