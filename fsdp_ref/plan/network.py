"""How long a collective takes: the alpha-beta model of a ring, inside a node and across nodes, and the bandwidths that are reported.

Ring (Thakur et al. 2005; NCCL's RING): an all-gather or reduce-scatter of S bytes over n ranks takes n - 1 steps and sends (n-1)/n S;
an all-reduce is both. The step's latency depends on what it crosses: NVLink inside a node, the network between nodes.

    8 ranks, S = 800 MB, 100 GB/s, 10 us a hop:    all-gather  7 x 10 us + 700 MB / 100 GB/s = 70 us + 7 ms

[Note: who shares the network] Rings of a group that has k ranks in every node use k cards of that node: k / per_node of its network. Eight
data-parallel groups beside tensor parallelism of 8 have one card each. So the bandwidth across nodes grows with k until NVLink limits it.

[Note: ring only] With NVLS (NVLink SHARP) the switch adds up, and the "bus bandwidth" of nccl-tests exceeds the wire: 480 > 450 GB/s on
H100. Its factor assumes 2 (n-1)/n of the message on the wire; with NVLS it is (n+1)/n (nccl-tests PR #239). Only rings are modelled here.
"""

from __future__ import annotations

from ..errors import ConfigError
from ..rows import wire_bytes
from .hardware import Machine
from .quantities import at_least

# nccl-tests, PERFORMANCE.md: busbw = algbw x factor, algbw = S / t; S is the whole message
BUS_FACTORS = {"all-reduce": lambda n: 2 * (n - 1) / n, "reduce-scatter": lambda n: (n - 1) / n, "all-gather": lambda n: (n - 1) / n,
               "all-to-all": lambda n: (n - 1) / n, "broadcast": lambda n: 1.0, "reduce": lambda n: 1.0, "send-receive": lambda n: 1.0}


def bus_factor(name: str, ranks: int) -> float:
    """What nccl-tests multiply S / t with. Raises ConfigError for a collective that has no factor."""
    if name not in BUS_FACTORS:
        raise ConfigError(f"there is no collective {name!r}; choose one of {', '.join(BUS_FACTORS)}")
    return BUS_FACTORS[name](ranks)


def ranks_in_a_node(machine: Machine, ranks: int, stride: int = 1) -> int:
    """How many members of a group of `ranks` stand in one node, if members are `stride` GPUs apart."""
    return max(1, min(ranks, machine.per_node // stride))


def bandwidth(machine: Machine, ranks: int, stride: int = 1) -> float:
    """Bytes a second that a ring over the group sends at best. [Note: who shares the network]"""
    inside = ranks_in_a_node(machine, ranks, stride)
    link, cards = machine.link * machine.link_share, machine.nic * machine.nic_share / machine.per_node
    if inside == ranks:
        return link
    return min(link, cards * inside) if inside > 1 else cards


def latency(machine: Machine, ranks: int, stride: int = 1) -> float:
    """Seconds that n - 1 steps round the ring take besides the bytes."""
    nodes = ranks / ranks_in_a_node(machine, ranks, stride)
    return (ranks - nodes) * machine.hop_link + (nodes - 1) * machine.hop_nic


def collective(machine: Machine, name: str, nbytes: float, ranks: int, stride: int = 1) -> float:
    """Seconds of an all-gather, reduce-scatter or all-reduce of `nbytes` (the whole message) over `ranks`, `stride` GPUs apart."""
    at_least(0, 1e18, nbytes=nbytes)
    if ranks == 1 or not nbytes:
        return 0.0
    rounds = 2 if name == "all-reduce" else 1
    return machine.base + rounds * latency(machine, ranks, stride) + wire_bytes(name, nbytes, ranks) / bandwidth(machine, ranks, stride)


def send(machine: Machine, nbytes: float, stride: int = 1) -> float:
    """Seconds to hand `nbytes` to the rank `stride` GPUs away (a pipeline's neighbour)."""
    near = stride < machine.per_node
    rate = machine.link * machine.link_share if near else machine.nic * machine.nic_share / machine.per_node
    return machine.base + (machine.hop_link if near else machine.hop_nic) + nbytes / rate


def hierarchical(machine: Machine, nbytes: float, shards: int, replicas: int, stride: int = 1) -> float:
    """Seconds of HSDP's reduction: a reduce-scatter inside the shards, an all-reduce of each rank's part across replicas."""
    return (collective(machine, "reduce-scatter", nbytes, shards, stride)
            + collective(machine, "all-reduce", nbytes / shards, replicas, stride * shards))


def efficiency(machine: Machine, name: str, nbytes: float, ranks: int, stride: int = 1) -> float:
    """The share of the time in which bytes move: how far from latency-bound a message is (FSDP paper, figure 2)."""
    total = collective(machine, name, nbytes, ranks, stride)
    return wire_bytes(name, nbytes, ranks) / bandwidth(machine, ranks, stride) / total if total else 1.0
