"""How a model is spread over GPUs and in which dtypes: plain values, checked once, that every part of the planner reads.

`Strategy` names the degrees of parallelism; `Dtypes` says how many bytes each kind of state has. [Note: which dtypes] Estimators err most
often by assuming one policy: 16 bytes a parameter arise in two ways that differ in what is gathered and reduced, and there are others.

    name      weights  gradients  master  moments  compute  reduce    whose
    fsdp         4        4         0        8        2        4      FSDP2, MixedPrecisionPolicy(bf16, reduce fp32): shards are the master
    mixed        2        2         4        8        2        2      ZeRO's K = 12 (arXiv 1910.02054, section 3.1), DeepSpeed
    megatron     2        4         4        8        2        4      Megatron-LM: 18 bytes a parameter (report_theoretical_memory)
    fp32         4        4         0        8        4        4      no mixed precision
    bf16         2        2         0        4        2        2      everything in bf16, moments too
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..errors import ConfigError
from ..placements import LADDER, Placements
from .quantities import at_least, pick, whole

STAGES: dict[str, Placements] = {row.name.lower().replace("-", ""): row for row in LADDER}        # ddp zero1 zero2 zero3 hsdp
RECOMPUTE = ("none", "selective", "full")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble-h1")


@dataclass(frozen=True)
class Dtypes:
    """Bytes of one element of each kind. `moments` are both of Adam's together; `master` 0 where the weights at rest are the master."""

    name: str
    weights: int
    gradients: int
    master: int
    moments: int
    compute: int
    reduce: int

    @property
    def at_rest(self) -> int:
        """Bytes a parameter that training needs in all, whoever holds them."""
        return self.weights + self.gradients + self.master + self.moments


DTYPES = {row.name: row for row in (Dtypes("fsdp", 4, 4, 0, 8, 2, 4), Dtypes("mixed", 2, 2, 4, 8, 2, 2),
                                    Dtypes("megatron", 2, 4, 4, 8, 2, 4), Dtypes("fp32", 4, 4, 0, 8, 4, 4),
                                    Dtypes("bf16", 2, 2, 0, 4, 2, 2))}


@dataclass(frozen=True)
class Strategy:
    """How one training step is spread.

    Attributes:
        gpus: in all. `tensor` x `context` x `pipeline` of them share one copy of the work; what is left is data parallel.
        stage: "ddp", "zero1", "zero2", "zero3" or "hsdp" over the data-parallel (and context-parallel) ranks.
        replicas: hsdp only: groups that each hold the whole model in shards.
        tensor, context, pipeline: degrees of tensor, context and pipeline parallelism.
        schedule, chunks: of the pipeline; `chunks` virtual stages a rank (interleaved only).
        micro_batch: sequences that run through a rank at once.
        micro_batches: how many of them make a step.
        sequence: tokens in a sequence (None: the model's context).
        dtypes: a row of `Dtypes`, by name.
        recompute: activation checkpointing: "none", "selective" (attention scores only) or "full" (all but each block's input).
        flash: True for attention that never stores scores.
        sequence_parallel: norms and dropouts split over the tensor-parallel ranks too (None: whenever tensor > 1).
        reshard: free whole weights after forward (zero3 and hsdp). False: one gather a step instead of two.
        prefetch: units gathered ahead.
        offload: True when weights, gradients and optimizer rest in the host's memory (FSDP2's CPUOffloadPolicy; zero3 and hsdp).
    """

    gpus: int = 1
    stage: str = "zero3"
    replicas: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    micro_batch: int = 1
    micro_batches: int = 1
    sequence: int | None = None
    dtypes: str = "fsdp"
    recompute: str = "none"
    flash: bool = True
    sequence_parallel: bool | None = None
    reshard: bool = True
    prefetch: int = 1
    offload: bool = False

    def __post_init__(self) -> None:
        counts = ("gpus", "replicas", "tensor", "context", "pipeline", "chunks", "micro_batch", "micro_batches")
        whole(**{name: getattr(self, name) for name in counts})
        at_least(0, 1000, prefetch=self.prefetch)
        if self.sequence is not None:
            whole(sequence=self.sequence)
        for name, known in (("stage", STAGES), ("dtypes", DTYPES), ("recompute", RECOMPUTE), ("schedule", SCHEDULES)):
            object.__setattr__(self, name, pick(name, getattr(self, name), known))
        together = self.tensor * self.context * self.pipeline
        if self.gpus % together:
            raise ConfigError(f"{self.gpus} GPUs cannot be cut into groups of tensor {self.tensor} x context {self.context} x pipeline "
                              f"{self.pipeline} = {together}; make gpus a multiple of {together}")
        if self.replicas > 1 and self.stage != "hsdp":
            raise ConfigError(f"replicas belong to hsdp and the stage is {self.stage}; leave replicas out or choose hsdp")
        if self.sharing % self.replicas:
            raise ConfigError(f"{self.replicas} replicas do not divide the {self.sharing} data-parallel ranks; use a divisor of "
                              f"{self.sharing}")
        if self.offload and self.stage not in ("zero3", "hsdp"):
            raise ConfigError(f"{self.stage} keeps whole weights on the GPU, so there is nothing to offload; use zero3 or hsdp")
        if self.chunks > 1 and self.schedule != "interleaved":
            raise ConfigError(f"{self.chunks} chunks a rank need schedule='interleaved', not {self.schedule!r}")

    @property
    def data(self) -> int:
        """Data-parallel ranks: those that see different sequences."""
        return self.gpus // (self.tensor * self.context * self.pipeline)

    @property
    def sharing(self) -> int:
        """Ranks that have the same weights to compute with: data x context."""
        return self.data * self.context

    @property
    def shards(self) -> int:
        """Ranks among which a sharded state is cut (torchtitan shards over data x context; hsdp inside a replica)."""
        return self.sharing // self.replicas

    @property
    def batch(self) -> int:
        """Sequences in a step, all ranks together."""
        return self.data * self.micro_batch * self.micro_batches

    @property
    def placements(self) -> Placements:
        """The row of the ladder."""
        return STAGES[self.stage]

    @property
    def bytes_of(self) -> Dtypes:
        """The dtypes' row."""
        return DTYPES[self.dtypes]

    @property
    def splits_sequence(self) -> bool:
        """Whether norms and dropouts are split over the tensor-parallel ranks."""
        return self.tensor > 1 if self.sequence_parallel is None else self.sequence_parallel

    def __str__(self) -> str:
        parts = [f"{self.stage} over {self.shards}" if self.sharing > 1 else "one copy"]
        parts += [f"{self.replicas} replicas"] if self.replicas > 1 else []
        parts += [f"{name} {getattr(self, name)}" for name in ("tensor", "context", "pipeline") if getattr(self, name) > 1]
        parts += [f"{self.micro_batches} x {self.micro_batch} sequences a rank"]
        parts += [f"{self.recompute} recompute"] if self.recompute != "none" else []
        parts += ["state in host memory"] if self.offload else []
        return ", ".join(parts)


def by_batch(batch: int, **more) -> Strategy:
    """A strategy from the global batch in sequences: `micro_batches` is what is left.

    Raises:
        ConfigError: the batch does not divide by the data-parallel ranks and the micro-batch.
    """
    whole(batch=batch)
    known = {field.name for field in fields(Strategy)}
    for name in more:
        pick("option", name, known)
    one = Strategy(**more)
    together = one.data * one.micro_batch
    if batch % together:
        below = batch // together * together
        near = f"{below} or {below + together}" if below else str(together)
        raise ConfigError(f"a batch of {batch} sequences does not divide by {one.data} data-parallel ranks x micro-batch "
                          f"{one.micro_batch} = {together}; use {near}, or fewer data-parallel ranks")
    return Strategy(**{**more, "micro_batches": batch // together})
