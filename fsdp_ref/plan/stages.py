"""Cutting a model into pipeline stages: contiguous, the dearest stage as cheap as possible, and whether each fits.

    print(partition("llama3.1-70b", stages=4, capacity=80e9))
    partition(lambda: MyModel(), stages=4, inputs=(example,))

The split is the classic one (linear partition): c(k, i), the least maximum over k contiguous segments of the first i modules, is
min over j of max(c(k-1, j), cost of j+1 ... i). The dynamic programme is exact; a test compares it with every possible cut.

[Note: cost] What is balanced is memory_weight x memory + (1 - memory_weight) x time, each as a share of the whole model's, since bytes and
seconds cannot be added (SageMaker's `memory_weight`: 0.8 for memory, 0.2 for speed; its documentation of automated splitting). Memory is
the state of the parameters; time is FLOP of forward, or parameters where they are not known.

[Note: tied modules] Modules that share a parameter must stand on one rank. A later one is taken out of the row and its cost joins the
first's: that rank is visited twice, as a tied head goes back to the embedding's. It balances, it does not enforce memory: `fits` says.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from .footprint import describe
from .quantities import at_least, both, table, whole
from .strategy import DTYPES


@dataclass(frozen=True)
class Node:
    """A module that is not cut: its name, bytes of state, work (FLOP, or parameters), and what ties it to others (() for nothing)."""

    name: str
    memory: float
    work: float
    ties: tuple[object, ...] = ()


@dataclass(frozen=True)
class Partition:
    """The stages as names of modules, with their memory in bytes and their share of the work."""

    stages: tuple[tuple[str, ...], ...]
    memory: tuple[float, ...]
    work: tuple[float, ...]
    capacity: float | None

    @property
    def fits(self) -> tuple[bool, ...]:
        """Whether each stage's state keeps within the capacity (activations are not in it; see `memory`)."""
        return tuple(self.capacity is None or each <= self.capacity for each in self.memory)

    @property
    def imbalance(self) -> float:
        """The dearest stage's work over the mean, less one: what the pipeline loses to uneven stages."""
        return max(self.work) * len(self.work) / sum(self.work) - 1

    def __str__(self) -> str:
        rows = [("stage", "modules", "from", "to", "state", "share of work", "fits")]
        for index, names in enumerate(self.stages):
            share = f"{100 * self.work[index] / sum(self.work):.1f} %"
            verdict = "-" if self.capacity is None else "yes" if self.fits[index] else "NO"
            rows.append((str(index), str(len(names)), names[0], names[-1], both(self.memory[index]), share, verdict))
        return f"{table(rows, right=(1, 5))}\nimbalance {100 * self.imbalance:.1f} %; not included: activations, buffers of communication"


def balance(costs: Sequence[float], parts: int) -> list[int]:
    """Ends of `parts` contiguous, non-empty segments of `costs` whose largest sum is as small as possible.

    >>> balance([1, 1, 1, 5, 1, 1], 3)
    [3, 4, 6]
    """
    whole(parts=parts)
    if parts > len(costs):
        raise ConfigError(f"{len(costs)} modules cannot make {parts} stages; use at most {len(costs)}")
    sums = [0.0, *itertools.accumulate(costs)]
    best = sums[:]                                                                      # c(1, i)
    cuts: list[list[int]] = []
    for count in range(2, parts + 1):
        now, cut = [float("inf")] * len(sums), [0] * len(sums)
        for end in range(count, len(sums)):
            for start in range(count - 1, end):
                value = max(best[start], sums[end] - sums[start])
                if value < now[end]:
                    now[end], cut[end] = value, start
        best = now
        cuts.append(cut)
    ends = [len(costs)]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    return ends[::-1]


def partition(model: object, stages: int, *, inputs: tuple | dict | None = None, memory_weight: float = 0.2,
              capacity: float | None = None, dtypes: str = "fsdp", nodes: Sequence[Node] | None = None) -> Partition:
    """Cut a model into `stages` pipeline stages.

    Args:
        model: whatever `memory` takes.
        inputs: example arguments for a module: FLOP are counted then.
        memory_weight: 0 balances time alone, 1 memory alone. [Note: cost]
        capacity: bytes a rank may hold; `fits` and the table say which stages keep to it.
        nodes: the modules in the order they run, instead of those found in the model.

    Raises:
        ConfigError: more stages than modules; absurd numbers.
    """
    at_least(0, 1, memory_weight=memory_weight)
    nodes = _merge(list(nodes) if nodes is not None else _nodes(model, inputs, dtypes))
    memory, work = sum(node[0].memory for node in nodes) or 1.0, sum(node[0].work for node in nodes) or 1.0
    costs = [memory_weight * node.memory / memory + (1 - memory_weight) * node.work / work for node, _ in nodes]
    ends = balance(costs, stages)
    groups = [nodes[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return Partition(tuple(tuple(name for _, names in group for name in names) for group in groups),
                     tuple(sum(node.memory for node, _ in group) for group in groups),
                     tuple(sum(node.work for node, _ in group) for group in groups), capacity)


def _merge(nodes: list[Node]) -> list[tuple[Node, list[str]]]:
    """Tied nodes become one, at the place of the first. [Note: tied modules]"""
    merged: list[tuple[Node, list[str]]] = []
    for node in nodes:
        same = [index for index, (other, _) in enumerate(merged) if set(other.ties) & set(node.ties)]
        if not same:
            merged.append((node, [node.name]))
            continue
        first, names = merged[same[0]]
        joined = [merged[index] for index in same[1:]] + [(node, [node.name])]
        for other, more in joined:
            first = Node(first.name, first.memory + other.memory, first.work + other.work, (*first.ties, *other.ties))
            names = names + more
        merged[same[0]] = (first, names)
        merged = [each for index, each in enumerate(merged) if index not in same[1:]]
    return merged


def _nodes(model: object, inputs: tuple | dict | None, dtypes: str) -> list[Node]:
    """Embedding, blocks, head of an architecture; the leaves of a module, in the order they run."""
    rest = DTYPES[dtypes].at_rest if dtypes in DTYPES else 16
    if not isinstance(model, str) and not hasattr(model, "block_flops"):
        from . import modules
        return [Node(name, parameters * rest, work, ties) for name, parameters, work, ties in modules.leaves(model, inputs)]
    shape = describe(model).architecture
    matrix = shape.vocab * shape.dim
    tie = ("head",) if shape.tied and not shape.patch else ()
    first = Node("embedding", (describe(model).root.parameters - (0 if tie else matrix)) * rest, 0.0, tie)
    blocks = [Node(f"block {i}", shape.block().parameters * rest, shape.block_flops(shape.context), ()) for i in range(shape.layers)]
    return [first, *blocks, Node("head", 0.0 if tie else matrix * rest, shape.head_flops(), tie)]
