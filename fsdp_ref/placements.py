"""The ZeRO ladder as a table: where each kind of state lives at rest, and what moves it from one place to another.

A stage is a *value*, not a class. The engine reads the row and does what follows from it; nothing else in the package knows the
stages by name. The rows are those of the ZeRO paper (arXiv 1910.02054, section 5 and 7) and of PyTorch FSDP's hybrid sharding
(arXiv 2304.11277, section 3.2.2).

Transitions are data too. With two ranks, rank 0 holding [1 2 3 4] and rank 1 holding [5 6 7 8]:

    SHARD     -> REPLICATE   all-gather       rank 0 [1 2], rank 1 [7 8]      ->  both [1 2 7 8]
    PARTIAL   -> SHARD       reduce-scatter   [1 2 3 4] + [5 6 7 8]           ->  rank 0 [6 8], rank 1 [10 12]
    PARTIAL   -> REPLICATE   all-reduce       [1 2 3 4] + [5 6 7 8]           ->  both [6 8 10 12]
    REPLICATE -> SHARD       local slice      both [6 8 10 12]                ->  rank 0 [6 8], rank 1 [10 12]
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from .errors import ConfigError


class Placement(enum.Enum):
    """Where one kind of state lives: whole on every rank, cut into one piece a rank, or whole but not yet summed."""

    REPLICATE = "replicate"
    SHARD = "shard"
    PARTIAL = "partial"


R, S, P = Placement.REPLICATE, Placement.SHARD, Placement.PARTIAL

TRANSITIONS: dict[tuple[Placement, Placement], str] = {
    (S, R): "all-gather",
    (P, S): "reduce-scatter",
    (P, R): "all-reduce",
    (R, S): "local slice",
}


def transition(source: Placement, target: Placement) -> str:
    """Name of the operation that turns `source` into `target`.

    Raises:
        ConfigError: no single operation does it (replicate -> partial, say).
    """
    if source is target:
        return "nothing"
    try:
        return TRANSITIONS[source, target]
    except KeyError:
        possible = ", ".join(f"{a.value} -> {b.value}" for a, b in TRANSITIONS)
        raise ConfigError(f"no operation turns {source.value} into {target.value}; the possible ones are {possible}") from None


@dataclass(frozen=True)
class Placements:
    """One row of the ladder.

    Attributes:
        parameter: home of the weights between steps.
        gradient: home of the gradients after backward.
        optimizer: home of the optimizer's moments.
        name: what pictures and messages call the row.
        replicas: True when the row is repeated over an outer mesh dimension (hybrid sharding): sharded inside a node, an
            all-reduce of the shard across nodes.
    """

    parameter: Placement
    gradient: Placement
    optimizer: Placement
    name: str = "custom"
    replicas: bool = False

    def __post_init__(self) -> None:
        for kind in ("parameter", "gradient", "optimizer"):
            if getattr(self, kind) is P:
                raise ConfigError(f"{kind} cannot rest as a partial sum; choose replicate or shard")
        if self.parameter is S and self.gradient is R:
            raise ConfigError("a sharded parameter with a replicated gradient wastes the memory that sharding saved and has no use"
                              " for the other rows; shard the gradient too (ZERO3)")
        if self.optimizer is R and (self.parameter is S or self.gradient is S):
            raise ConfigError("a replicated optimizer needs the whole parameter and the whole gradient on every rank; shard the"
                              " optimizer (ZERO1, ZERO2, ZERO3) or replicate all three (DDP)")

        if self.replicas and self.parameter is R:
            raise ConfigError("replicas repeat a sharded row over groups of ranks; a row with whole parameters on every rank is a replica "
                              "everywhere already, so leave replicas out or shard the parameter (HSDP)")

    def bytes_per_parameter(self, world_size: int, *, parameter: int = 4, gradient: int = 4, optimizer: int = 8) -> float:
        """Bytes at rest that one parameter costs one rank (ZeRO paper, figure 1; defaults: fp32 weights and Adam).

        >>> DDP.bytes_per_parameter(4), ZERO3.bytes_per_parameter(4)
        (16.0, 4.0)
        """
        sizes = ((self.parameter, parameter), (self.gradient, gradient), (self.optimizer, optimizer))
        return float(sum(size / world_size if home is S else size for home, size in sizes))


DDP = Placements(R, R, R, "DDP")
ZERO1 = Placements(R, R, S, "ZeRO-1")
ZERO2 = Placements(R, S, S, "ZeRO-2")
ZERO3 = Placements(S, S, S, "ZeRO-3")
HSDP = Placements(S, S, S, "HSDP", replicas=True)
LADDER = (DDP, ZERO1, ZERO2, ZERO3, HSDP)


def chunk_rows(rows: int, world_size: int, rank: int) -> tuple[int, int, int]:
    """(rows in a padded chunk, first row of `rank`, rows of `rank`) by torch.chunk's rule: chunk = ceil(rows / world size).

    >>> [chunk_rows(5, 4, rank) for rank in range(4)]
    [(2, 0, 2), (2, 2, 2), (2, 4, 1), (2, 5, 0)]
    """
    chunk = math.ceil(rows / world_size)
    first = min(rank * chunk, rows)
    return chunk, first, min(chunk, rows - first)
