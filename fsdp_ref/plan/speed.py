"""How long a step takes, term by term, from shapes and a machine's figures. Closed formulas: microseconds to answer, no simulation.

    compute      matrix FLOP / (flops x matmul x KERNELS), and activations through memory, PASSES times ([Note: one efficiency model])
    recompute    forward again, for what was not kept
    tensor       two all-reduces' worth a block in forward, as much in backward (Megatron-LM, arXiv 1909.08053, section 3), not hidden
    context      keys and values of the whole sequence gathered in every block, their gradients reduced; not hidden
    data         gathers and reductions beyond what compute hides, block by block
    bubble       (p - 1) / (v m) of the pipeline's work (arXiv 2104.04473, section 2.2), and the sends between stages
    optimizer    every byte of the state once in, once out; from the host's memory with offload, and then the transfers too

[Note: one efficiency model] Two numbers are fitted, and to all runs of published/runs.csv together; no run and no machine has its own.
KERNELS is the share of the best measured matrix multiplication (hardware.toml) that a training step's reach, launches and stragglers
included. PASSES is how often the bytes that autograd keeps (activations.py) go through memory for work that multiplies nothing: norms,
activation functions, residuals. Without fusion it would be 2 in forward (write, read) and 3 in backward (read; write and read a gradient);
casts and copies make it more. `fsdp-ref plan validate` prints every row's error; a test fits both anew. SPREAD is how far nine rows in ten
lie from the prediction, and so the range that is printed.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..placements import Placement
from . import activations
from .architecture import Architecture, Description
from .footprint import check, describe, share, total
from .hardware import Machine
from .hardware import machine as find_machine
from .network import collective, hierarchical, send
from .quantities import seconds, table
from .strategy import Strategy

KERNELS, PASSES, SPREAD = 0.65, (3.0, 4.5), 0.37
NOT_INCLUDED = ("stragglers and failures", "loading data and logging", "contention between collectives that run at once",
                "kernels that communication slows down (it takes some of the GPU's processors)")


@dataclass(frozen=True)
class Timing:
    """One step. `parts` in seconds; `seconds` is their sum.

    `flops` is the model's work in a step (without recomputation), so `mfu` is model FLOPs utilisation; `hfu` counts what is recomputed.
    """

    parts: dict[str, float]
    flops: float
    hardware_flops: float
    tokens: float
    strategy: Strategy
    machine: Machine

    @property
    def seconds(self) -> float:
        """Predicted time of a step. [Note: one efficiency model]"""
        return sum(self.parts.values())

    @property
    def flops_per_gpu(self) -> float:
        """Model FLOP a second and GPU."""
        return self.flops / self.seconds / self.strategy.gpus

    @property
    def mfu(self) -> float:
        """Share of the dense peak that the model's own FLOP use."""
        return self.flops_per_gpu / self.machine.flops

    @property
    def hfu(self) -> float:
        """The same with recomputed FLOP."""
        return self.mfu * self.hardware_flops / self.flops

    @property
    def exposed(self) -> float:
        """Share of the step that waits for communication."""
        return sum(self.parts[name] for name in ("tensor", "context", "data", "sends")) / self.seconds

    def __str__(self) -> str:
        total = self.seconds
        rows = [("a step's time", "", "share")]
        rows += [(name, seconds(value), f"{100 * value / total:.1f} %") for name, value in self.parts.items() if value]
        lines = [table(rows, right=(1, 2)), "",
                 f"step {seconds(self.seconds / (1 + SPREAD))} to {seconds(self.seconds * (1 + SPREAD))}, "
                 f"{self.tokens / self.seconds / self.strategy.gpus:,.0f} tokens/s a GPU, "
                 f"MFU {100 * self.mfu:.0f} %, HFU {100 * self.hfu:.0f} % of {self.machine.flops / 1e12:.0f} TFLOP/s dense",
                 "not included:", *(f"  - {line}" for line in NOT_INCLUDED)]
        return "\n".join(lines)


def step_time(model: object, strategy: Strategy, machine: str | Machine) -> Timing:
    """Predict one step.

    Raises:
        ConfigError: an unknown model or machine, numbers that do not fit, or a module whose work is not known.
    """
    description, machine = describe(model), find_machine(machine)
    check(description, strategy)
    if description.architecture is None and not description.work:
        raise ConfigError(f"the time of {description.name} needs its FLOP; give example inputs: plan.modules.describe(model, inputs)")
    return (_of_module if description.architecture is None else _of_architecture)(description, strategy, machine)


def _of_architecture(description: Description, strategy: Strategy, machine: Machine) -> Timing:
    shape: Architecture = description.architecture
    p, m, v, t = strategy.pipeline, strategy.micro_batches, strategy.chunks, strategy.tensor
    sequence = strategy.sequence or shape.context
    tokens = strategy.micro_batch * sequence / strategy.context                         # through one rank, a micro-batch
    blocks = len(description.blocks) / p
    rate = machine.flops * machine.matmul * KERNELS
    matrix = tokens * shape.block_flops(sequence) / t / rate
    head = tokens * shape.head_flops() / (shape.context if shape.patch else 1) / t / rate / p          # spread: stages are balanced
    moved = sum(activations.of_block(shape, strategy, sequence).values()) / machine.hbm
    forward, backward = matrix + PASSES[0] * moved, 2 * matrix + PASSES[1] * moved
    again = forward if strategy.recompute == "full" else 0.0
    if strategy.recompute == "selective" and not strategy.flash:
        again = tokens * 4 * shape.dim * sequence / t / rate
    width = strategy.bytes_of.compute
    stream = tokens * shape.dim * width                                                 # bytes between blocks
    tensor = 2 * collective(machine, "all-reduce", stream, t) * (3 if strategy.recompute == "full" else 2)
    hand_over = 0.0 if p == 1 else 2 * v * send(machine, stream / (t if strategy.splits_sequence else 1), t * strategy.context)
    work = blocks * (forward + backward + again) + 3 * head
    keys = 2 * tokens * shape.kv_dim * width * strategy.context / t                     # keys and values of the whole sequence
    context = 3 * collective(machine, "all-gather", keys, strategy.context, t)
    shared = tensor + context
    parts = {"compute": m * (work - blocks * again), "recompute": m * blocks * again, "tensor": m * blocks * tensor,
             "context": m * blocks * context,
             "data": _exposed(description, strategy, machine, blocks, (forward + shared / 3, backward + again + 2 * shared / 3)),
             "bubble": (p - 1) / v * (work + blocks * shared), "sends": m * hand_over, **_optimizer(description, strategy, machine)}
    flops = strategy.batch * sequence * shape.flops_per_token(sequence)
    extra = strategy.batch * sequence * shape.layers * shape.block_flops(sequence) if strategy.recompute == "full" else 0.0
    return Timing(parts, flops, flops + extra, strategy.batch * sequence, strategy, machine)


def _of_module(description: Description, strategy: Strategy, machine: Machine) -> Timing:
    """The same from what modules.py counted; "tokens" are samples."""
    blocks, m = max(1, len(description.blocks)), strategy.micro_batches
    rate = machine.flops * machine.matmul * KERNELS
    matrix = strategy.micro_batch * sum(description.work) / rate
    moved = strategy.micro_batch * sum(description.saved or ()) / machine.hbm
    forward, backward = matrix + PASSES[0] * moved, 2 * matrix + PASSES[1] * moved
    again = forward if strategy.recompute == "full" else 0.0
    parts = {"compute": m * (forward + backward), "recompute": m * again, "tensor": 0.0, "context": 0.0,
             "data": _exposed(description, strategy, machine, blocks, (forward / blocks, (backward + again) / blocks)),
             "bubble": 0.0, "sends": 0.0, **_optimizer(description, strategy, machine)}
    flops = 3 * strategy.batch * sum(description.work)
    return Timing(parts, flops, flops * (4 / 3 if again else 1), strategy.batch, strategy, machine)


def _exposed(description: Description, strategy: Strategy, machine: Machine, blocks: float, compute: tuple[float, float]) -> float:
    """Seconds of the step that wait for gathers and reductions of weights and gradients.

    ZeRO-3: the next block's gather runs under this block's forward; in backward the gather and the reduction of neighbours share the
    network and run under this block's backward. Nothing hides the first gather and the last reduction. ZeRO-1/2 gather after the step.
    """
    row, shards, replicas = strategy.placements, strategy.shards, strategy.replicas
    if strategy.sharing == 1:
        return 0.0
    stride, dtypes = strategy.tensor, strategy.bytes_of
    block = share(description.blocks[0], strategy.tensor) if description.blocks else 0.0
    root = share(description.root, strategy.tensor) / (2 if strategy.pipeline > 1 else 1)
    gather, first = (collective(machine, "all-gather", size * dtypes.compute, shards, stride) for size in (block, root))
    if row.gradient is Placement.SHARD or row.optimizer is Placement.SHARD:
        reduce, last = (hierarchical(machine, size * dtypes.reduce, shards, replicas, stride) for size in (block, root))
    else:
        reduce, last = (collective(machine, "all-reduce", size * dtypes.reduce, shards, stride) for size in (block, root))
    forward, backward = compute
    if row.parameter is not Placement.SHARD:
        after = blocks * gather + first if row.optimizer is Placement.SHARD else 0.0
        return blocks * max(0.0, reduce - backward) + last + after
    if not strategy.reshard or strategy.pipeline > 1:                                   # one gather, one reduction a step
        return blocks * (max(0.0, gather - forward) + max(0.0, reduce - backward)) + first + last
    return strategy.micro_batches * (blocks * (max(0.0, gather - forward) + max(0.0, gather + reduce - backward)) + 2 * first + last)


def _optimizer(description: Description, strategy: Strategy, machine: Machine) -> dict[str, float]:
    """Seconds to read and write the optimizer's state, weights and gradients once, on the GPU or where they rest.

    With offload, weights go to the GPU for every gather, gradients come back, and the host's memory is what the optimizer waits for.
    """
    elements = total((description.root, *description.blocks), lambda part: share(part, strategy.tensor, True)) / strategy.pipeline
    held = elements / (strategy.shards if strategy.placements.optimizer is Placement.SHARD else 1)
    state = 2 * held * strategy.bytes_of.at_rest
    if not strategy.offload:
        return {"optimizer": state / machine.hbm, "offload": 0.0}
    weights = total((description.root, *description.blocks), lambda part: share(part, strategy.tensor))
    there = (2 if strategy.reshard else 1) * weights / strategy.pipeline / strategy.shards * strategy.bytes_of.weights
    moved = strategy.micro_batches * (there + held * strategy.bytes_of.gradients)
    return {"optimizer": state / machine.host, "offload": moved / machine.pcie}
