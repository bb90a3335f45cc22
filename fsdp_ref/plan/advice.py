"""`advise(model, cluster, batch, goal)`: the few strategies that fit, ranked, each with its reason, and what was ruled out and why.

    print(advise("llama3.1-8b", Cluster(machine("h100"), 8), batch=64))

Every candidate (candidates.py) gets a footprint and a time. One that does not fit is ruled out with the bytes it lacks; of each way to cut
the model the best member is kept. Ranked by the goal: "time" (of a step on all GPUs), "memory" (bytes a rank) or "cost" (GPU hours for a
billion tokens, which may leave GPUs unused). Where nothing fits, what would change the training is offered and said to do so: adapters,
bf16 moments, host memory. It plans with formulas: the ranking of close calls is not certain, and the range of speed.py is printed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import ConfigError
from .architecture import Description
from .candidates import Cluster, Family, Step, families, ladder, sizes, strategies
from .footprint import Footprint, describe, memory
from .hardware import machine as find_machine
from .interval import Interval, checkpoint_bytes, interval
from .quantities import both, pick, seconds, spread, table, whole
from .speed import SPREAD, Timing, step_time
from .strategy import Strategy

GOALS = ("time", "memory", "cost")
MANY = 4            # strategies to show


@dataclass(frozen=True)
class Option:
    """A strategy that fits: what it holds, how long it takes, what it costs, and why one would take it."""

    name: str
    footprint: Footprint
    timing: Timing
    verdict: str
    reason: str

    @property
    def gpu_hours(self) -> float:
        """GPU hours for a billion tokens (samples, for a module)."""
        return self.timing.seconds / self.timing.tokens * 1e9 * self.footprint.strategy.gpus / 3600


@dataclass(frozen=True)
class Advice:
    """The answer. `options` best first; `ruled_out`: (what, why); `steps`: the ladder of measures; `notes`: what else to know."""

    model: str
    cluster: Cluster
    goal: str
    options: tuple[Option, ...]
    ruled_out: tuple[tuple[str, str], ...]
    steps: tuple[Step, ...]
    notes: tuple[str, ...]
    checkpoints: Interval | None = None

    def __str__(self) -> str:
        capacity = self.cluster.machine.memory
        lines = [f"{self.model} on up to {self.cluster.gpus} x {self.cluster.machine.name} ({both(capacity)} each), goal: {self.goal}", ""]
        rows = [("strategy", "GPUs", "a rank holds", "fits", "step", "MFU", "GPU h / 1e9 tokens")]
        for option in self.options:
            strategy, timing = option.footprint.strategy, option.timing
            step = f"{seconds(timing.seconds / (1 + SPREAD))} to {seconds(timing.seconds * (1 + SPREAD))}"
            held = both(option.footprint.low, option.footprint.high)
            rows.append((f"{option.name}: {strategy}", str(strategy.gpus), held, option.verdict, step, f"{100 * timing.mfu:.0f} %",
                         f"{option.gpu_hours:,.3g}" + self._price(option)))
        lines += [table(rows, right=(1, 4, 5, 6)) if self.options else "nothing fits", ""]
        lines += [f"  {option.name}: {option.reason}" for option in self.options]
        lines += ["", "ruled out:", *(f"  {what}: {why}" for what, why in self.ruled_out)]
        lines += ["", "what each measure saves (one after the other):"]
        lines += [f"  {step.name:<34}{both(step.footprint.low, step.footprint.high):>48}   fits: {step.footprint.fits(capacity)}"
                  for step in self.steps]
        lines += ["", *(f"note: {note}" for note in self.notes)]
        return "\n".join(lines + ([f"failures: {self.checkpoints}"] if self.checkpoints else []))

    def _price(self, option: Option) -> str:
        return "" if self.cluster.price is None else f" ({option.gpu_hours * self.cluster.price:,.4g})"


def advise(model: object, cluster: Cluster | str, batch: int, goal: str = "time", *, gpus: int | None = None, sequence: int | None = None,
           dtypes: str = "fsdp", **more) -> Advice:
    """Which strategies fit and which to take.

    Args:
        model: whatever `memory` takes; a module needs example inputs (`plan.modules.describe(model, inputs)`) for its time.
        cluster: a `Cluster`, or a machine's name with `gpus` (and `price`, `mtbf_hours`, ... as keywords).
        batch: sequences in a step, all ranks together.
        goal: "time", "memory" or "cost".

    Raises:
        ConfigError: an unknown name or numbers that cannot be.
    """
    whole(batch=batch)
    goal = pick("goal", goal, GOALS)
    if not isinstance(cluster, Cluster):
        spec = find_machine(cluster)
        cluster = Cluster(spec, gpus if gpus is not None else spec.per_node, **more)
    elif more or gpus is not None:
        raise ConfigError(f"{', '.join([*more, *(['gpus'] if gpus is not None else [])])} belong into the Cluster that was given")
    description = describe(model)
    fixed = {"sequence": sequence, "dtypes": dtypes}
    options, ruled_out = _weigh(description, cluster, batch, goal, fixed)
    if not options:
        options = _other_trainings(description, cluster, batch, fixed)
    options.sort(key=lambda option: (option.verdict != "yes", _value(option, goal)))
    if options:
        ruled_out += [(option.name, f"fits, and is behind {options[0].name} in {goal} ({_behind(option, options[0], goal)})")
                      for option in options[MANY:]]
    ladder_steps = ladder(description, cluster, batch, **fixed)
    return Advice(description.name, cluster, goal, tuple(options[:MANY]), tuple(ruled_out), tuple(ladder_steps),
                  tuple(_notes(description, cluster, options)), _checkpoints(description, cluster, dtypes))


def _weigh(description: Description, cluster: Cluster, batch: int, goal: str, fixed: dict) -> tuple[list[Option], list[tuple[str, str]]]:
    """The best member of every family that fits; and why the others do not."""
    options, ruled_out = [], []
    for gpus in sizes(cluster) if goal == "cost" else [cluster.gpus]:
        for family in families(description, cluster, gpus):
            members = list(strategies(family, gpus, batch, **fixed))
            found = [option for strategy in members if (option := _option(description, cluster, family, strategy))]
            if found:
                options.append(min(found, key=lambda option: (option.verdict != "yes", _value(option, goal))))
            elif goal != "cost" or gpus == cluster.gpus:
                ruled_out.append((family.name, _why_not(description, cluster, family, members, batch)))
    if goal == "cost":
        best: dict[str, Option] = {}
        for option in sorted(options, key=lambda option: option.gpu_hours):
            best.setdefault(option.name, option)
        options = list(best.values())
    return options, ruled_out


def _option(description: Description, cluster: Cluster, family: Family, strategy: Strategy) -> Option | None:
    try:
        footprint = memory(description, strategy)
    except ConfigError:
        return None
    verdict = footprint.fits(cluster.machine.memory)
    if verdict == "no":
        return None
    timing = step_time(description, strategy, cluster.machine)
    return Option(family.name, footprint, timing, verdict, _reason(family, footprint, timing, cluster))


def _reason(family: Family, footprint: Footprint, timing: Timing, cluster: Cluster) -> str:
    strategy, capacity = footprint.strategy, cluster.machine.memory
    used = f"{spread(100 * footprint.low / capacity, 100 * footprint.high / capacity, 0)} % of the memory"
    waits = f"{100 * timing.exposed:.0f} % of the step waits for the network"
    text = f"{family.purpose}; {used}, {waits}"
    if strategy.pipeline > 1:
        text += f", {100 * timing.parts['bubble'] / timing.seconds:.0f} % is the pipeline's bubble"
    return text + (", and recomputation costs a quarter of the compute" if strategy.recompute == "full" else "")


def _why_not(description: Description, cluster: Cluster, family: Family, members: list[Strategy], batch: int) -> str:
    if not members:
        return f"a batch of {batch} sequences does not divide that way"
    found = []
    for strategy in members:
        try:
            found.append(memory(description, strategy))
        except ConfigError as error:
            return str(error)
    least = min(found, key=lambda footprint: footprint.low)
    return (f"needs {both(least.low)} a rank at least, even with micro-batch {least.strategy.micro_batch} and recomputation "
            f"'{least.strategy.recompute}'; the GPU has {both(cluster.machine.memory)}")


def _other_trainings(description: Description, cluster: Cluster, batch: int, fixed: dict) -> list[Option]:
    """What fits if the training itself may change: said so in the reason."""
    shape, zero3 = description.architecture, Family("ZeRO-3", {"stage": "zero3"}, "")
    changes = [("ZeRO-3, state in host memory", description, {"offload": True},
                "the same training, slower: the optimizer runs on the host"),
               ("ZeRO-3, all in bf16", description, {"dtypes": "bf16"},
                "another training: bf16 weights and moments round small updates away")]
    if shape is not None:
        changes.insert(0, ("ZeRO-3, adapters of rank 16", shape.with_adapters(16), {"dtypes": "bf16"},
                           "another training: weights are frozen in bf16 and only low-rank adapters learn"))
    found = []
    for name, what, change, remark in changes:
        family = replace(zero3, name=name, purpose=remark)
        members = [option for strategy in strategies(zero3, cluster.gpus, batch, **fixed | change)
                   if (option := _option(what, cluster, family, strategy))]
        found += [min(members, key=lambda option: (option.verdict != "yes", option.timing.seconds))] if members else []
    return found


def _value(option: Option, goal: str) -> float:
    return {"time": option.timing.seconds, "memory": option.footprint.high, "cost": option.gpu_hours}[goal]


def _behind(option: Option, best: Option, goal: str) -> str:
    return f"{100 * (_value(option, goal) / _value(best, goal) - 1):.0f} % more"


def _notes(description: Description, cluster: Cluster, options: list[Option]) -> list[str]:
    notes = []
    if not options:
        notes.append("nothing fits: take more GPUs, GPUs with more memory, a smaller model or shorter sequences")
    if any(option.verdict == "perhaps" for option in options[:MANY]):
        notes.append("'perhaps': the GPU's memory lies inside the range; try a step before you rent the rest")
    close = [option.name for option in options[1:MANY] if option.timing.seconds < 1.1 * options[0].timing.seconds]
    if close:
        notes.append(f"{', '.join(close)} is within 10 % of the first, closer than the prediction's error: measure both")
    if options and options[0].timing.exposed > 0.2:
        notes.append("more than a fifth of the step waits for the network: a larger micro-batch hides more, and HSDP keeps it inside nodes")
    if any(kind.startswith("BatchNorm") for kind in description.kinds):
        notes.append("the model has BatchNorm, whose statistics are each rank's own; nn.SyncBatchNorm.convert_sync_batchnorm shares them")
    if cluster.nodes > 1:
        notes.append(f"{cluster.nodes} nodes share {8 * cluster.machine.nic / 1e9:.0f} Gb/s each: the whole node's network, not one GPU's")
    return notes


def _checkpoints(description: Description, cluster: Cluster, dtypes: str) -> Interval | None:
    if cluster.mtbf_hours is None:
        return None
    save = checkpoint_bytes(description.parameters, dtypes) / cluster.save_rate
    hourly = None if cluster.price is None else cluster.price * cluster.gpus
    return interval(save, 3600 * cluster.mtbf_hours / cluster.nodes, cluster.restart, hourly)
