"""Memory: what the worst rank holds at the worst moment of a step, term by term.

    print(memory("llama3.1-8b", gpus=8, micro_batch=2, recompute="full"))

A term is one `Item`: bytes at least, bytes at most, and how it was reckoned in a sentence. The ends differ where the truth depends on what
no formula knows; a sum of ranges is a range. What is not reckoned at all stands under "not included", because every estimator that
misled its users left something out in silence (DeepSpeed #4527, #5305, Megatron-LM #525; llm-analysis had to add whole units).

[Note: the worst moment] Backward of a block under ZeRO-3: shards, gradients' shards and optimizer rest; the root and the block in hand
are whole, with their gradients; the next block's gather and one reduction (with its result) are on their way (fsdp_ref/forecast.py,
measured there against the engine's ledger). A *unit* is whole, not a Linear: "largest layer" understates by the number of Linears in a
block.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..errors import ConfigError
from ..placements import Placement
from ..rows import Category
from . import activations
from .architecture import Architecture, Description, Part
from .presets import preset
from .quantities import GB, GiB, both, spread, table
from .strategy import Dtypes, Strategy

# stas00/ml-engineering: 0.55 GiB of CUDA context, about 1.5 GiB more with NCCL's buffers at the first barrier
CONTEXT, NCCL = 0.55 * GiB, 1.5 * GiB
NOT_INCLUDED = ("fragmentation: what the allocator reserves beyond what is allocated (record_stream keeps blocks longer)",
                "casts of shards on their way to a gather, fp32 copies inside norms, workspaces of kernels",
                "the optimizer's temporaries (foreach implementations), the input batch, datasets, evaluation and checkpoint staging")


@dataclass(frozen=True)
class Item:
    """One term: bytes between `low` and `high`, and how they come about."""

    name: str
    low: float
    high: float
    how: str


@dataclass(frozen=True)
class Footprint:
    """What one rank holds. `items` in stacking order; `low` and `high` are their sums in bytes; `host`: bytes in the host's memory."""

    model: str
    strategy: Strategy
    items: tuple[Item, ...]
    stage_index: int = 0
    not_included: tuple[str, ...] = field(default=NOT_INCLUDED, repr=False)
    host: float = 0.0

    @property
    def low(self) -> float:
        """Bytes at least."""
        return sum(item.low for item in self.items)

    @property
    def high(self) -> float:
        """Bytes at most."""
        return sum(item.high for item in self.items)

    def of(self, name: str) -> float:
        """Bytes (at least) of one item; 0 where there is none."""
        return sum(item.low for item in self.items if item.name == name)

    def fits(self, capacity: float) -> str:
        """"yes", "no" or "perhaps" (the capacity, in bytes, lies inside the range)."""
        return "yes" if self.high <= capacity else "no" if self.low > capacity else "perhaps"

    def __str__(self) -> str:
        rows = [("what one rank holds", "GiB", "GB", "how")]
        rows += [(item.name, spread(item.low / GiB, item.high / GiB), spread(item.low / GB, item.high / GB), item.how)
                 for item in self.items]
        rows.append(("sum", spread(self.low / GiB, self.high / GiB), spread(self.low / GB, self.high / GB), ""))
        if self.host:
            rows.append(("in host memory", f"{self.host / GiB:.2f}", f"{self.host / GB:.2f}", "weights, gradients, optimizer"))
        where = f", pipeline stage {self.stage_index} (the fullest)" if self.strategy.pipeline > 1 else ""
        head = f"{self.model}: {self.strategy} on {self.strategy.gpus} GPUs, dtypes {self.strategy.dtypes}{where}"
        return "\n".join([head, "", table(rows, right=(1, 2)), "", "not included:", *(f"  - {line}" for line in self.not_included)])


def states(trained: float, frozen: float, shards: int, strategy: Strategy) -> dict[Category, float]:
    """Bytes at rest of weights, gradients and optimizer for so many elements: the row of the ladder (ZeRO, section 5) in `dtypes`.

    Weights that rest whole beside a sharded optimizer of wider dtype are there twice: whole in the compute dtype, sharded as master.
    """
    row, dtypes = strategy.placements, strategy.bytes_of
    cut = {kind: shards if getattr(row, kind) is Placement.SHARD else 1 for kind in ("parameter", "gradient", "optimizer")}
    wide = cut["parameter"] == 1 and cut["optimizer"] > 1 and dtypes.compute < dtypes.weights
    whole = row.parameter is Placement.REPLICATE
    weights = (trained + frozen) * (dtypes.compute if wide else dtypes.weights) / cut["parameter"]
    master = trained * (dtypes.master + (dtypes.weights if wide else 0)) / cut["optimizer"]
    gradients = Category.SHARDED_GRAD if row.gradient is Placement.SHARD else Category.UNSHARDED_GRAD
    found = {Category.UNSHARDED_PARAM if whole else Category.SHARDED_PARAM: weights,
             gradients: trained * dtypes.gradients / cut["gradient"],
             Category.OPTIMIZER: trained * dtypes.moments / cut["optimizer"] + master}
    return found


def describe(model: object) -> Description:
    """Anything that can be planned as a `Description`: a preset's name, an `Architecture`, an `nn.Module`, a transformers config."""
    if isinstance(model, Description):
        return model
    if isinstance(model, str):
        model = preset(model)
    if isinstance(model, Architecture):
        return model.describe()
    from . import modules  # needs torch
    return modules.describe(model)


def memory(model: object, strategy: Strategy | None = None, *, runtime: bool = True, **options) -> Footprint:
    """What the fullest rank holds at the worst moment of a step.

    Args:
        model: a preset's name, an `Architecture`, a `Description`, an `nn.Module` (on meta will do) or a transformers config.
        strategy: or its fields as keyword arguments (see `Strategy`).
        runtime: False leaves out what CUDA and NCCL take (and what torch's allocator does not count).

    Raises:
        ConfigError: an unknown model; numbers that do not fit each other or the model.
    """
    description = describe(model)
    strategy = strategy or Strategy(**options)
    check(description, strategy)
    found = [_of_stage(description, strategy, index, runtime) for index in sorted({0, strategy.pipeline - 1})]
    return max(found, key=lambda footprint: footprint.low)


def check(description: Description, strategy: Strategy) -> None:
    """Raise ConfigError where the strategy does not fit the model."""
    shape, stages = description.architecture, strategy.pipeline * strategy.chunks
    if stages > max(1, len(description.blocks)):
        raise ConfigError(f"{description.name} has {len(description.blocks)} blocks, too few for {stages} pipeline stages; use fewer")
    if shape is None and (strategy.tensor > 1 or strategy.context > 1 or strategy.pipeline > 1):
        raise ConfigError(f"{description.name} is a module, and only data parallelism of modules is planned here; give a preset or an "
                          "Architecture for tensor, context or pipeline parallelism (plan.partition cuts a module into stages)")
    if shape is not None and (shape.heads % strategy.tensor or shape.kv % strategy.tensor):
        raise ConfigError(f"{shape.name} has {shape.heads} heads and {shape.kv} key-value heads, which tensor {strategy.tensor} does not "
                          "divide; use a divisor of both")
    if shape is not None and strategy.sequence is not None and strategy.sequence % strategy.context:
        raise ConfigError(f"a sequence of {strategy.sequence} tokens cannot be cut into {strategy.context} equal parts; use a multiple")
    if shape is not None and shape.patch and strategy.sequence not in (None, shape.context):
        raise ConfigError(f"{shape.name} looks at {shape.context} patches; leave sequence out")


def stage_parts(description: Description, strategy: Strategy, index: int) -> tuple[Part, tuple[Part, ...]]:
    """(what the root of stage `index` holds, its blocks): embedding on the first stage, last norm and head on the last."""
    p, root, blocks = strategy.pipeline, description.root, description.blocks
    if p == 1:
        return root, blocks
    each = math.ceil(len(blocks) / p)
    shape = description.architecture
    first = [(shape.vocab, shape.dim)] + ([(shape.context, shape.dim)] if shape.positions else [])
    last = [(shape.vocab, shape.dim), (shape.dim,)]
    shapes = first if index == 0 else last if index == p - 1 else []
    return Part("root", tuple(shapes)), blocks[index * each : index * each + each] or blocks[:each]


def total(parts: Iterable[Part], measure: Callable[[Part], float]) -> float:
    """The sum of `measure` over parts; repeated parts (the blocks of an architecture are one object) are measured once."""
    return sum(count * measure(part) for part, count in Counter(parts).items())


def share(part: Part, tensor: int, trained_only: bool = False) -> float:
    """Elements of a part on one tensor-parallel rank: matrices are cut, vectors are not."""
    shapes = part.shapes if trained_only else (*part.shapes, *part.frozen)
    return sum(math.prod(shape) / (tensor if len(shape) > 1 else 1) for shape in shapes)


def _of_stage(description: Description, strategy: Strategy, index: int, runtime: bool) -> Footprint:
    root, blocks = stage_parts(description, strategy, index)
    everything = (root, *blocks)
    trained = total(everything, lambda part: share(part, strategy.tensor, True))
    frozen = total(everything, lambda part: share(part, strategy.tensor)) - trained
    at_rest = states(trained, frozen, strategy.shards, strategy)
    host = sum(at_rest.values()) if strategy.offload else 0.0
    items = [] if strategy.offload else [Item(str(kind), value, value, _how(kind, strategy)) for kind, value in at_rest.items()]
    items += _whole_units(root, blocks, strategy)
    if strategy.shards > 1:
        padding = total(everything, lambda part: part.padding(strategy.shards)) / strategy.shards * strategy.bytes_of.at_rest
        items.append(Item("padding", padding, padding, "rows that make shards equally long"))
    items += _activations(description, strategy, index, len(blocks))
    if description.buffers:
        items.append(Item("buffers", description.buffers, description.buffers, "the model's buffers, whole on every rank"))
    if runtime:
        items.append(Item("runtime", CONTEXT, CONTEXT + (NCCL if strategy.gpus > 1 else 0), "CUDA context, and NCCL's buffers at most"))
    missing = list(NOT_INCLUDED)
    if description.architecture is None and description.saved is None:
        missing.insert(0, "activations: give example inputs to plan.modules.describe(model, inputs) and they are counted")
    return Footprint(description.name, strategy, tuple(item for item in items if item.high > 0), index, tuple(missing), host)


def _how(kind: Category, strategy: Strategy) -> str:
    dtypes, cut = strategy.bytes_of, f" / {strategy.shards} shards" if strategy.shards > 1 else ""
    return {Category.SHARDED_PARAM: f"{dtypes.weights} bytes a parameter{cut}",
            Category.UNSHARDED_PARAM: "whole weights at rest",
            Category.SHARDED_GRAD: f"{dtypes.gradients} bytes a parameter{cut}",
            Category.UNSHARDED_GRAD: f"{dtypes.gradients} bytes a parameter, whole",
            Category.OPTIMIZER: f"{dtypes.moments} bytes of moments and what the master copy needs"
                                f"{cut if strategy.placements.optimizer is Placement.SHARD else ''}"}[kind]


def _whole_units(root: Part, blocks: tuple[Part, ...], strategy: Strategy) -> list[Item]:
    """Whole weights, whole gradients and buffers on their way. [Note: the worst moment]"""
    dtypes: Dtypes = strategy.bytes_of
    if strategy.sharing == 1:
        return []
    largest = max((share(part, strategy.tensor) for part in dict.fromkeys(blocks)), default=0.0)
    grown = max((share(part, strategy.tensor, True) for part in dict.fromkeys(blocks)), default=0.0)
    around, stage = share(root, strategy.tensor), total((root, *blocks), lambda part: share(part, strategy.tensor))
    row, c = strategy.placements, dtypes.compute
    items = []
    if row.parameter is Placement.SHARD:
        stays = not strategy.reshard or strategy.pipeline > 1
        whole = stage if stays else around + largest
        items.append(Item("whole weights in use", whole * c, whole * c,
                          "weights stay whole between forward and backward" if stays else "the root and one block"))
        if not stays:
            ahead = min(strategy.prefetch, max(0, len(blocks) - 1)) * largest * c
            items.append(Item(str(Category.ALL_GATHER), ahead, ahead, f"{strategy.prefetch} block(s) gathered ahead"))
    if row.gradient is Placement.SHARD:
        grads = (share(root, strategy.tensor, True) + grown) * c
        items.append(Item("whole gradients", grads, grads, "the root and one block, until they are reduced"))
    buffer = max(grown, around if not blocks else 0.0) * dtypes.reduce * (1 + (row.gradient is Placement.SHARD) / strategy.shards)
    items.append(Item(str(Category.REDUCE_SCATTER), buffer, buffer, f"one reduction on its way and its result, {dtypes.reduce} bytes each"))
    return items


def _activations(description: Description, strategy: Strategy, index: int, blocks: int) -> list[Item]:
    shape = description.architecture
    if shape is None:
        return _measured_activations(description, strategy)
    sequence = strategy.sequence or shape.context
    tokens = strategy.micro_batch * sequence / strategy.context
    one = sum(activations.of_block(shape, strategy, sequence).values())
    flights = activations.in_flight(strategy, index)
    kept = activations.block_input(shape, tokens, strategy.bytes_of.compute) if strategy.recompute == "full" else one
    items = [Item("activations", kept * blocks * flights, kept * blocks * flights,
                  f"{blocks} blocks x {flights:g} micro-batch(es) in flight, recompute {strategy.recompute}")]
    if strategy.recompute == "full":
        items.append(Item("a block that is recomputed", one, one, "its activations, while its backward runs"))
    items.append(Item("gradients of activations", 2 * activations.block_input(shape, tokens, strategy.bytes_of.compute), one,
                      "the stream's and the block's input, at most all that one block keeps"))
    if index == strategy.pipeline - 1:
        low, high = activations.logits(shape, tokens, strategy.tensor, strategy.bytes_of.compute)
        items.append(Item("logits and loss", low, high, "logits, log-softmax in fp32, at most its gradient too"))
    return items


def _measured_activations(description: Description, strategy: Strategy) -> list[Item]:
    """Activations that modules.py counted without data: by sample, so they scale with the micro-batch."""
    if description.saved is None:
        return []
    scale = strategy.micro_batch
    largest = max(description.saved[:-1], default=0.0)
    if strategy.recompute == "full":
        kept = sum(description.edges) + description.saved[-1]
        return [Item("activations", kept * scale, kept * scale, "inputs of blocks and what the root keeps (counted without data)"),
                Item("a block that is recomputed", largest * scale, largest * scale, "the largest, while its backward runs")]
    total = sum(description.saved) * scale
    return [Item("activations", total, total, "what autograd keeps, counted without data"),
            Item("gradients of activations", 0, largest * scale, "at most all that one block keeps")]


def summary(footprint: Footprint) -> str:
    """One line: the range in both units."""
    return f"{footprint.model}: {both(footprint.low, footprint.high)} a rank"
