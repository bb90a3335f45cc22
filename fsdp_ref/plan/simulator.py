"""`simulate`: one training step of the engine itself, on the meta device, for any number of ranks, with predicted times.

    found = simulate("llama3.1-8b", 64, machine="h100")
    print(found); viz.overlap and every other picture take found.ledger

Nothing is imitated: the model is sharded by `data_parallel` and trained by its own hooks, as rank 0 of a world that has no other processes.
Tensors are on meta (shapes without memory), each parameter is one slice, and collectives go to timeline.py instead of a network. What comes
out is the same `Ledger` that a recording gives: collectives, waits, compute, allocations, at predicted times. It can go wrong only where
costs are wrong, never in the order of events.

[Note: one rank] Rank 0 stands for all: every rank does the same, and with torch.chunk's rule no other rank holds more rows.

[Note: the second step] The first forward does not know the order to prefetch in, so a warm-up step runs first and the second one is kept.

This module must never run where a process group is alive: it makes one of its own, of `ranks` ranks of which 1 exists.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .. import collectives, ledger, wrap
from ..engine import data_parallel
from ..errors import ConfigError
from ..ledger import Lane, Ledger
from ..placements import HSDP, ZERO3, Placement, Placements
from ..policies import MixedPrecisionPolicy
from . import modules, network, shapes
from .architecture import Architecture
from .costs import ROOT, Costs, from_architecture, from_machine
from .hardware import Machine
from .hardware import machine as find_machine
from .presets import preset
from .quantities import both, seconds, whole
from .strategy import DTYPES, Strategy
from .timeline import Clock, Network


@dataclass(frozen=True)
class Simulation:
    """A predicted step: `seconds`, `exposed` seconds of waiting for collectives, `peak` bytes of the books, and the whole ledger."""

    ledger: Ledger
    seconds: float
    exposed: float
    peak: int
    ranks: int

    def __str__(self) -> str:
        sent = sum(event.wire_bytes for event in self.ledger.events)
        return (f"predicted step of {self.ranks} ranks: {seconds(self.seconds)}, of which {seconds(self.exposed)} wait for collectives; "
                f"peak {both(self.peak)} a rank; {both(sent)} sent by each\nnot included: activations (plan.memory has them), stragglers, "
                "contention, what is computed slower while communication runs")


def simulate(model: object, ranks: int, *, machine: str | Machine | None = None, costs: Costs | None = None,
             peers: Sequence[Costs] = (), inputs: Any = None, micro_batch: int = 1, sequence: int | None = None, recompute: str = "none",
             placements: Placements = ZERO3, replicas: int = 1, units: Callable[[nn.Module], list[nn.Module]] = wrap.blocks,
             mp_policy: MixedPrecisionPolicy | None = None, link: tuple[float, float] | None = None, in_flight: int | None = None,
             **options: Any) -> Simulation:
    """Predict one training step.

    Args:
        model: a preset's name, an `Architecture`, or a function that builds a module.
        ranks: the world; it is not started.
        machine: whose figures give times of compute and collectives.
        costs, peers: times of compute instead, as `costs.from_ledger` takes them from a recorded step; those of the other ranks, if ranks
            differ.
        inputs: what forward takes (a tensor or a tuple), for a module.
        micro_batch, sequence, recompute: for a preset: sequences a rank, tokens in each, activation checkpointing (see `Strategy`).
        placements, replicas, units, options: as in `data_parallel`; `replicas` groups for HSDP; `units` is a function of the model.
        mp_policy: default bf16 compute and fp32 reduction for rows that shard, as is usual on GPUs; plain where `costs` are given.
        link: (bytes a second, seconds a message) of an emulated link instead of the machine's network (`collectives.emulate`).
        in_flight: gathers that may be ahead of compute (default 2 with a machine, as on GPUs; None where `costs` were measured on CPUs).

    Raises:
        ConfigError: numbers that do not fit; a process group is alive; a model that cannot be built or run on meta.
    """
    whole(ranks=ranks, replicas=replicas, micro_batch=micro_batch)
    spec = find_machine(machine) if machine is not None else None
    if (spec is None) == (costs is None):
        raise ConfigError("simulate takes its times of compute from machine= or from costs=; give one of them")
    if spec is None and link is None:
        raise ConfigError("measured costs say nothing of the network; give link=(bytes a second, seconds a message)")
    model = preset(model) if isinstance(model, str) else model
    built, arguments = _built(model, inputs, micro_batch, sequence)
    if mp_policy is None:
        low = spec is not None and placements.optimizer is Placement.SHARD
        mp_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else MixedPrecisionPolicy()
    if costs is None:
        costs = _costs_of(model, built, arguments, units, spec, ranks, placements, mp_policy, (micro_batch, sequence, recompute))
        in_flight = 2 if in_flight is None else in_flight
    clock = Clock(len(peers))
    cost = _of_link(*link) if link is not None else partial(network.collective, spec)
    with _world(ranks, placements, replicas) as mesh:
        carrier, pace = Network(clock, cost, _stride, in_flight), Pace(clock, costs, tuple(peers))
        with collectives.carried_by(carrier.carry), ledger.afresh(clock):
            return _replay(built, arguments, mesh, placements, units, mp_policy, pace, options)


def _built(model: object, inputs: Any, micro_batch: int, sequence: int | None) -> tuple[nn.Module, tuple]:
    if isinstance(model, Architecture):
        return shapes.build(model), (shapes.example(model, micro_batch, sequence or model.context),)
    if inputs is None:
        raise ConfigError("simulate needs example inputs for a module; give inputs=(tensor, ...)")
    built = modules.build(model)
    if any(tensor.device.type != "meta" for tensor in (*built.parameters(), *built.buffers())):
        built = built.to("meta")
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    return built, tuple(each.to("meta") if isinstance(each, torch.Tensor) else each for each in arguments)


def _costs_of(model: object, built: nn.Module, arguments: tuple, units: Callable, machine: Machine, ranks: int, placements: Placements,
              policy: MixedPrecisionPolicy, shape: tuple) -> Costs:
    if isinstance(model, Architecture):
        micro_batch, sequence, recompute = shape
        stage = "ddp" if placements.optimizer is Placement.REPLICATE else "zero3"
        return from_architecture(model, machine, Strategy(ranks, stage, micro_batch=micro_batch, sequence=sequence, recompute=recompute))
    chosen = list(units(built))
    description = modules.describe(built, arguments, units=chosen, dtype=policy.param_dtype or torch.float32)
    names = {module: name for name, module in built.named_modules()}
    order = [names[module] for module in built.modules() if module in set(chosen)]
    shards = ranks if placements.optimizer is Placement.SHARD else 1
    return from_machine(description, order, machine, arguments[0].shape[0], shards, DTYPES["fsdp"].at_rest)


def _of_link(bandwidth: float, latency: float) -> Callable[[str, float, int, int], float]:
    """The time that `collectives.emulate(bandwidth, latency)` makes a message take."""
    return lambda name, nbytes, ranks, stride: latency + ledger.wire_bytes(name, nbytes, ranks) / bandwidth


@contextlib.contextmanager
def _world(ranks: int, placements: Placements, replicas: int) -> Iterator[DeviceMesh]:
    """A process group of `ranks` in which only rank 0 exists (torch's fake backend), and its mesh on meta."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    if dist.is_initialized():
        raise ConfigError("simulate makes a process group of its own and this process has one; end it with "
                          "fsdp_ref.world.stop(), or call simulate where none is")
    if placements.replicas != (replicas > 1) or ranks % replicas:
        raise ConfigError(f"{replicas} replicas do not fit {placements.name} on {ranks} ranks; HSDP needs a divisor above 1, others 1")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        if placements is HSDP or placements.replicas:
            yield init_device_mesh("meta", (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))
        else:
            yield init_device_mesh("meta", (ranks,))
    finally:
        dist.destroy_process_group()
        collectives.reset_sequence()


def _stride(group: dist.ProcessGroup) -> int:
    """How many ranks apart the members of a group are."""
    members = dist.get_process_group_ranks(group)
    return members[1] - members[0] if len(members) > 1 else 1


def _replay(model: nn.Module, arguments: tuple, mesh: DeviceMesh, placements: Placements, units: Callable, policy: MixedPrecisionPolicy,
            pace: Pace, options: dict) -> Simulation:
    chosen = list(units(model))
    names = {module: name for name, module in model.named_modules()}
    for module in chosen:
        _charge(module, names[module], pace)
    _charge(model, ROOT, pace)
    data_parallel(model, placements, mesh, units=chosen, mp_policy=policy, **options)
    first = next((module for module in model.modules() if module in set(chosen)), None)
    if first is not None:
        first.register_forward_pre_hook(lambda _, args: after(args, lambda: pace.spend("tail")), prepend=True)
    optimizer = Moments(model.parameters(), lambda: pace.spend("optimizer"))

    def step() -> None:
        pace.spend("begin")
        try:
            output = model(*arguments)
        except NotImplementedError as error:
            raise ConfigError(f"{type(model).__name__} cannot run on the meta device ({str(error).splitlines()[0]}); a planner has no "
                              "numbers") from error
        pace.spend("loss")
        _loss(output).backward()
        optimizer.step()
        optimizer.zero_grad()
        pace.spend("end")

    step()                                                                              # [Note: the second step]
    pace.clock.reach(pace.clock.last)                                                   # a step begins with all ranks together
    with ledger.record(ranks=dist.get_world_size(), predicted=True, placements=placements.name) as book:
        with ledger.mark("step"):
            step()
    kept = book.window("step")
    waited = sum(event.end - event.start for event in kept.events if event.lane == Lane.WAIT)
    return Simulation(book, kept.end - kept.start, waited, book.peak_bytes(ledger.rank()), dist.get_world_size())


def _loss(output: Any) -> torch.Tensor:
    """A scalar of whatever forward returned."""
    value = output if isinstance(output, torch.Tensor) else next(iter(output.values() if isinstance(output, dict) else output))
    return value.float().mean()


@dataclass(frozen=True)
class Pace:
    """The clock, and what each piece of a step takes on it: this rank's costs and those of the others."""

    clock: Clock
    own: Costs
    peers: tuple[Costs, ...]

    def spend(self, piece: str, unit: str | None = None) -> None:
        """Let the time of one piece go by ("forward" and "backward" are a unit's)."""
        own, *peers = (getattr(costs, piece) if unit is None else getattr(costs, piece).get(unit, 0.0) for costs in (self.own, *self.peers))
        self.clock.advance(own, peers)


def _charge(module: nn.Module, name: str, pace: Pace) -> None:
    """Let the clock advance at the end of a unit's forward and at the begin of its backward.

    Registered before the engine's own hooks, so forward's time is over when those run; the node on the output runs after the engine's
    hook on it has gathered the weights, and before the module's backward.
    """
    def forward(_: nn.Module, args: tuple, output: Any) -> Any:
        pace.spend("forward", name)
        return after(output, lambda: pace.spend("backward", name))
    module.register_forward_hook(forward)


def after(value: Any, act: Callable[[], None]) -> Any:
    """`value` with its first differentiable tensor passed through a node whose backward calls `act`."""
    from ..nested import map_tensors, need_gradient
    found = need_gradient(value)
    if not found:
        return value
    marked = _Node.apply(act, found[0])
    return map_tensors(lambda tensor: marked if tensor is found[0] else tensor, value)


class _Node(torch.autograd.Function):
    """The identity; its backward calls a function."""

    @staticmethod
    def forward(ctx, act: Callable[[], None], tensor: torch.Tensor) -> torch.Tensor:
        ctx.act = act
        return tensor.clone()                               # of shapes alone: the engine wants no views as outputs

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple:
        ctx.act()
        return None, grad


class Moments(torch.optim.Optimizer):
    """AdamW's state without its arithmetic: two moments and a step number for each parameter that has a gradient.

    DTensors on meta cannot run Adam's operations; the engine's books see the same bytes, at the same moment.
    """

    def __init__(self, params: Iterator[nn.Parameter], act: Callable[[], None]) -> None:
        super().__init__(params, {})
        self.act = act

    def step(self, closure: None = None) -> None:
        """Make the state where there is none, and take the time of a step."""
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            own = getattr(param, "_local_tensor", param)
            if param not in self.state:
                self.state[param] = {"step": torch.empty((), device="meta"), "exp_avg": torch.empty_like(own),
                                     "exp_avg_sq": torch.empty_like(own)}
        self.act()
