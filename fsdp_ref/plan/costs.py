"""What compute costs in the simulator: seconds of each unit's own forward and backward, from a machine or from a measured step.

`from_machine` reckons as speed.py does (KERNELS, PASSES). `from_ledger` takes a recorded step of real ranks apart: everything that a rank
did and that was not waiting belongs to one unit's forward or backward, so the sum of the parts is the step without its waits.

[Note: whose time] Between two units' recorded spans a rank frees, copies out what was gathered, copies gradients in. What comes before
the wait for the next unit's gather is counted to the unit before, what comes after it (the copy out) to the next. The root's own forward
is what follows its last block; its backward is what precedes the first wait. What follows the last block until the reductions are waited
for (the embedding's gradient) is its tail, and what comes after that wait, the optimizer apart, the step's end.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from ..errors import ConfigError
from ..ledger import Event, Lane, Ledger
from . import activations
from .architecture import Architecture, Description
from .hardware import Machine
from .speed import KERNELS, PASSES
from .strategy import Strategy

ROOT = "(root)"
PLAIN = ("begin", "loss", "tail", "optimizer", "end")       # pieces of a step that are no unit's


@dataclass
class Costs:
    """Seconds by unit's name; the root is `ROOT`. `begin`: from the step's begin to forward; `tail`: from the last block's backward to the
    wait for its reduction; `end`: what is left after that, besides the optimizer."""

    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)
    begin: float = 0.0
    loss: float = 0.0
    tail: float = 0.0
    optimizer: float = 0.0
    end: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of compute in a step."""
        return sum(self.forward.values()) + sum(self.backward.values()) + sum(getattr(self, name) for name in PLAIN)


def from_architecture(shape: Architecture, machine: Machine, strategy: Strategy) -> Costs:
    """What `machine` needs for one micro-batch of a preset: units are named as in shapes.py."""
    sequence = strategy.sequence or shape.context
    tokens, rate = strategy.micro_batch * sequence, machine.flops * machine.matmul * KERNELS
    moved = sum(activations.of_block(shape, strategy, sequence).values()) / machine.hbm
    matrix, head = tokens * shape.block_flops(sequence) / rate, tokens * shape.head_flops() / rate
    forward, backward = matrix + PASSES[0] * moved, 2 * matrix + PASSES[1] * moved
    names = [f"blocks.{number}" for number in range(shape.layers)]
    costs = Costs(dict.fromkeys(names, forward), dict.fromkeys(names, backward + (forward if strategy.recompute == "full" else 0.0)))
    costs.forward[ROOT], costs.backward[ROOT] = head, 2 * head
    costs.optimizer = 2 * shape.parameters / strategy.shards * strategy.bytes_of.at_rest / machine.hbm
    return costs


def from_machine(description: Description, names: list[str], machine: Machine, samples: int, shards: int, at_rest: int) -> Costs:
    """What `machine` needs for `samples` samples of a module: units named `names`, in the order of `description.blocks`, then the root.

    Raises:
        ConfigError: the description was made without example inputs, so nothing is known of the work.
    """
    if not description.work or description.saved is None:
        raise ConfigError(f"the time of {description.name} needs its FLOP; describe it with example inputs")
    rate = machine.flops * machine.matmul * KERNELS
    costs = Costs()
    for name, work, saved in zip([*names, ROOT], description.work, description.saved, strict=True):
        matrix, moved = samples * work / rate, samples * saved / machine.hbm
        costs.forward[name] = matrix + PASSES[0] * moved
        costs.backward[name] = 2 * matrix + PASSES[1] * moved
    costs.optimizer = 2 * description.trained / shards * at_rest / machine.hbm
    return costs


def from_ledger(step: Ledger, rank: int) -> Costs:
    """Take one recorded step of one rank apart (`step`: `ledger.window(...)` of it). [Note: whose time]

    Raises:
        ConfigError: the ledger has no forward or no backward of that rank.
    """
    events = [event for event in step.events if event.rank == rank]
    waits = sorted((event.start, event.end, event) for event in events if event.lane == Lane.WAIT)
    costs, moment, last = Costs(), step.start, ""
    for phase, into in (("forward", costs.forward), ("backward", costs.backward)):
        spans = [event for event in events if event.lane == Lane.COMPUTE and event.name == phase]
        if not spans:
            raise ConfigError(f"the recorded step of rank {rank} has no {phase}; record a whole training step")
        root = max(spans, key=lambda event: event.end - event.start)
        inner = sorted((event for event in spans if event is not root), key=lambda event: event.start)
        busy = lambda start, end: max(0.0, end - start - _waited(waits, start, end))  # noqa: E731
        name = {id(event): event.unit for event in inner}
        before = root.start
        setattr(costs, "begin" if phase == "forward" else "loss", busy(moment, before))
        last = ROOT
        into[ROOT] = 0.0
        for event in inner:
            split = _split(waits, before, event)
            into[last] = into.get(last, 0.0) + busy(before, split)
            last = name[id(event)]
            into[last] = into.get(last, 0.0) + busy(split, event.end)
            before = event.end
        moment = root.end
        if phase == "forward":
            into[ROOT] += busy(before, root.end)
        else:
            optimizer = [event for event in events if event.lane == Lane.OPTIMIZER]
            costs.optimizer = sum(event.end - event.start for event in optimizer)
            waited_for = min((start for start, _, _ in waits if start >= before), default=root.end)
            costs.tail = busy(before, waited_for)
            costs.end = max(0.0, busy(waited_for, step.end) - costs.optimizer)
    return costs


def _split(waits: list[tuple[float, float, Event]], start: float, event: Event) -> float:
    """Where the time between two units changes hands: at the wait for the next one's gather, else when the next one begins."""
    own = [begin for begin, end, wait in waits if start <= begin and end <= event.start and wait.unit == event.unit]
    return own[-1] if own else event.start


def _waited(waits: list[tuple[float, float, Event]], start: float, end: float) -> float:
    return sum(max(0.0, min(end, stop) - max(start, begin)) for begin, stop, _ in waits)


def by_kind(costs: Costs) -> dict[str, float]:
    """Seconds of forward, backward and the rest."""
    found: dict[str, float] = defaultdict(float)
    found |= {"forward": sum(costs.forward.values()), "backward": sum(costs.backward.values()),
              "rest": sum(getattr(costs, name) for name in PLAIN)}
    return dict(found)
