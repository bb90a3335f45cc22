"""What `advise` weighs: the strategies that could be used on a cluster, and the ladder of cheaper measures one climbs first.

`families` are ways to cut the model, in the order in which a careful person tries them: nothing cut, optimizer, gradients, weights, shards
inside a node, tensor inside a node, pipeline across nodes. Within each, micro-batch and recomputation vary. Only sizes that fit the batch
and the model are made. This module must never judge.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..errors import ConfigError
from .architecture import Description
from .footprint import Footprint, check, memory
from .hardware import Machine
from .quantities import at_least, whole
from .strategy import Strategy, by_batch

MICRO_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Cluster:
    """What can be had.

    Attributes:
        machine: the kind of node, by name or as a `Machine`.
        gpus: how many at most.
        price: of one GPU for an hour, in any currency (None: cost is counted in GPU hours).
        mtbf_hours: hours between failures or preemptions of one node (None: they are not reckoned with).
        save_rate: bytes a second that a checkpoint is written with, all ranks together.
        restart: seconds from a failure to the first step.
    """

    machine: Machine
    gpus: int
    price: float | None = None
    mtbf_hours: float | None = None
    save_rate: float = 2e9
    restart: float = 300.0

    def __post_init__(self) -> None:
        whole(gpus=self.gpus)
        at_least(1, 1e15, save_rate=self.save_rate)
        at_least(0, 1e7, restart=self.restart)
        for name in ("price", "mtbf_hours"):
            if getattr(self, name) is not None:
                at_least(1e-9, 1e9, **{name: getattr(self, name)})

    @property
    def nodes(self) -> int:
        """Nodes that hold the GPUs."""
        return -(-self.gpus // self.machine.per_node)


@dataclass(frozen=True)
class Family:
    """One way to cut: its name, the fields of `Strategy` that make it, and what it is for, in a few words."""

    name: str
    fields: dict
    purpose: str


def families(description: Description, cluster: Cluster, gpus: int) -> list[Family]:
    """The ways to cut the model over `gpus`, simplest first."""
    node = min(cluster.machine.per_node, gpus)
    if gpus == 1:
        return [Family("one GPU", {"stage": "ddp"}, "no communication at all")]
    found = [Family("DDP", {"stage": "ddp"}, "whole state on every GPU, least communication"),
             Family("ZeRO-1", {"stage": "zero1"}, "optimizer cut, the same communication as DDP"),
             Family("ZeRO-2", {"stage": "zero2"}, "optimizer and gradients cut, the same communication as DDP"),
             Family("ZeRO-3", {"stage": "zero3"}, "everything cut, 1.5 times the communication")]
    if gpus > node and gpus % node == 0:
        found.append(Family("HSDP", {"stage": "hsdp", "replicas": gpus // node}, "everything cut inside a node, gradients summed across"))
    shape = description.architecture
    if shape is None:
        return found
    for tensor in (2, 4, 8):
        if tensor <= node and gpus % tensor == 0 and not (shape.heads % tensor or shape.kv % tensor):
            found.append(Family(f"tensor {tensor} + ZeRO-3", {"stage": "zero3", "tensor": tensor}, "matrices cut inside a node"))
    for pipeline in (2, 4, 8, 16):
        for tensor in (1, node):
            fits = not (shape.heads % tensor or shape.kv % tensor) and gpus % (tensor * pipeline) == 0
            if fits and gpus > node and pipeline <= len(description.blocks):
                name = f"pipeline {pipeline} + ZeRO-1" if tensor == 1 else f"tensor {tensor} + pipeline {pipeline} + ZeRO-1"
                found.append(Family(name, {"stage": "zero1", "tensor": tensor, "pipeline": pipeline}, "layers cut across nodes"))
    return found


def strategies(family: Family, gpus: int, batch: int, **fixed) -> Iterator[Strategy]:
    """The family's members that make exactly this batch, with every micro-batch and with and without recomputation."""
    for micro_batch in MICRO_BATCHES:
        for recompute in ("none", "full"):
            try:
                yield by_batch(batch, gpus=gpus, micro_batch=micro_batch, recompute=recompute, **family.fields, **fixed)
            except ConfigError:
                continue                                                    # this batch cannot be cut that way


def sizes(cluster: Cluster) -> list[int]:
    """Numbers of GPUs worth a thought, fewest first: powers of two inside a node, then nodes doubled, and all of them."""
    found, count = [], 1
    while count <= cluster.gpus:
        found.append(count)
        count *= 2
    return sorted({*found, cluster.gpus})


@dataclass(frozen=True)
class Step:
    """One rung: what is done, and what a rank then holds."""

    name: str
    footprint: Footprint


def ladder(description: Description, cluster: Cluster, batch: int, **fixed) -> list[Step]:
    """The order in which to save memory, each rung with those before it: smaller micro-batches, mixed precision, recomputation, then
    cutting the state over more and more GPUs, then tensor inside a node and pipeline across."""
    everywhere = {"sequence": fixed.get("sequence")}
    node = min(cluster.machine.per_node, cluster.gpus)
    first = Strategy(stage="ddp", dtypes="fp32", micro_batch=min(batch, 8), **everywhere)
    rungs = [("fp32, micro-batch as it comes", first)]
    for name, change in (("micro-batch 1", {"micro_batch": 1}), ("mixed precision", {"dtypes": fixed.get("dtypes", "fsdp")}),
                         ("activation checkpointing", {"recompute": "full"})):
        rungs.append((name, replace(rungs[-1][1], **change)))
    for stage in ("zero1", "zero2", "zero3") if cluster.gpus > 1 else ():
        rungs.append((f"{stage} over {cluster.gpus} GPUs", replace(rungs[3][1], gpus=cluster.gpus, stage=stage)))
    for name, change in ((f"tensor {node} inside a node", {"tensor": node}), ("pipeline 2 across nodes", {"pipeline": 2})):
        if cluster.gpus > 1 and description.architecture is not None:
            try:
                taller = replace(rungs[-1][1], **change)
                check(description, taller)
            except ConfigError:
                continue
            rungs.append((name, taller))
    return [Step(name, memory(description, strategy)) for name, strategy in rungs]
