"""The shape of a transformer: exact parameter counts, FLOPs a token, and the shapes that sharding cuts.

An `Architecture` is a handful of numbers; nothing is built. It covers what differs between GPT-2/3, Llama and ViT: grouped heads, gated
MLPs, biases, the kind of norm, tied heads, learned positions, patches. What a planner needs of any model is a `Description`: the shapes
of each unit's parameters in the order they run. An architecture gives one here; an `nn.Module` gives one in modules.py.

Sources: GPT-3 (arXiv 2005.14165, table 2.1), Llama 2 (2307.09288), Llama 3 (2407.21783, table 3), ViT (2010.11929, table 1). The counts
are tested against those of the published models built by transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..errors import ConfigError
from ..placements import chunk_rows
from .quantities import at_least, whole

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Part:
    """A unit: what is gathered together. `shapes` of its trained parameters, `frozen` of the others. Equal only to itself."""

    name: str
    shapes: tuple[Shape, ...]
    frozen: tuple[Shape, ...] = ()

    @property
    def parameters(self) -> int:
        """Elements, trained and frozen."""
        return sum(map(math.prod, self.shapes)) + sum(map(math.prod, self.frozen))

    @property
    def trained(self) -> int:
        """Elements that get a gradient and optimizer state."""
        return sum(map(math.prod, self.shapes))

    def padding(self, shards: int) -> int:
        """Elements that chunk's rule adds in all, over `shards` ranks (placements.chunk_rows): every rank holds as many."""
        rows = [(shape[0] if shape else 1, math.prod(shape[1:])) for shape in (*self.shapes, *self.frozen)]
        return sum((chunk_rows(count, shards, 0)[0] * shards - count) * width for count, width in rows)


@dataclass(frozen=True)
class Description:
    """What the planner knows of a model.

    Attributes:
        name: what tables call it.
        root: what belongs to no block (embeddings, last norm, head); it stays whole from forward to backward.
        blocks: the repeated units, in the order they run.
        buffers: bytes of the model's buffers.
        architecture: its shape, where it is a known transformer (None: activations must come from a run on meta, see modules.py).
        saved: bytes that autograd keeps for one sample, by block, root last (counted by modules.py; None: not measured).
        edges: bytes of each block's input for one sample (counted by modules.py; what full recomputation keeps).
        kinds: names of the classes of its modules (a module's).
        work: FLOP of forward for one sample, by block, root last (counted by modules.py).
    """

    name: str
    root: Part
    blocks: tuple[Part, ...]
    buffers: int = 0
    architecture: Architecture | None = None
    saved: tuple[float, ...] | None = None
    edges: tuple[float, ...] = ()
    work: tuple[float, ...] = field(default=(), repr=False)
    kinds: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Elements of the whole model, each parameter once."""
        return self.root.parameters + sum(block.parameters for block in self.blocks)

    @property
    def trained(self) -> int:
        """Elements that are trained."""
        return self.root.trained + sum(block.trained for block in self.blocks)


@dataclass(frozen=True)
class Architecture:
    """The numbers that make a transformer.

    Attributes:
        layers, dim, heads, kv_heads, ffn, vocab, context: as in the papers; `kv_heads` below `heads` is grouped-query attention. For a
            ViT `vocab` are the classes and `context` the patches with the class token.
        gated: True for SwiGLU (three matrices), False for GELU (two).
        bias: True when linear layers have a bias and norms are LayerNorms with one; False: none, and RMSNorm.
        tied: True when head and token embedding share a matrix.
        positions: True when positions are learned (a matrix of context x dim).
        dropout: True when training drops (masks are kept for backward).
        patch: side of a ViT's patches in pixels; 0 for a language model.
        causal: True when attention looks back only (a kernel then may skip half of the scores).
    """

    name: str
    layers: int
    dim: int
    heads: int
    ffn: int
    vocab: int
    context: int
    kv_heads: int = 0
    gated: bool = False
    bias: bool = True
    tied: bool = True
    positions: bool = True
    dropout: bool = False
    patch: int = 0
    causal: bool = True
    source: str = ""

    def __post_init__(self) -> None:
        whole(layers=self.layers, dim=self.dim, heads=self.heads, ffn=self.ffn, vocab=self.vocab, context=self.context)
        at_least(0, 10**6, kv_heads=self.kv_heads, patch=self.patch)
        if self.dim % self.heads:
            raise ConfigError(f"dim {self.dim} cannot be cut into {self.heads} equal heads; make it a multiple of {self.heads}")
        if self.heads % self.kv:
            raise ConfigError(f"{self.heads} heads cannot share {self.kv} key-value heads equally; make kv_heads a divisor of heads")

    @property
    def kv(self) -> int:
        """Key-value heads."""
        return self.kv_heads or self.heads

    @property
    def kv_dim(self) -> int:
        """Width of keys, and of values."""
        return self.kv * self.dim // self.heads

    def block(self, name: str = "block") -> Part:
        """The shapes of one block: norm, attention, norm, MLP."""
        h, f, kv = self.dim, self.ffn, self.kv_dim
        matrices: list[Shape] = [(h, h), (kv, h), (kv, h), (h, h)]                                  # query, key, value, output
        matrices += [(f, h), (f, h), (h, f)] if self.gated else [(f, h), (h, f)]
        vectors = [(rows,) for rows, _ in matrices] if self.bias else []
        norms: list[Shape] = [(h,)] * (4 if self.bias else 2)                                       # a LayerNorm has a bias too
        return Part(name, (*norms, *matrices, *vectors))

    def root(self) -> Part:
        """What is outside the blocks: embedding, positions, last norm, head."""
        h = self.dim
        shapes: list[Shape] = [(h, 3 * self.patch**2), (h,), (1, h)] if self.patch else [(self.vocab, h)]
        shapes += [(self.context, h)] if self.positions else []
        shapes += [(h,)] * (2 if self.bias else 1)
        if self.patch:
            shapes += [(self.vocab, h), (self.vocab,)]
        elif not self.tied:
            shapes += [(self.vocab, h)]
        return Part("root", tuple(shapes))

    def describe(self) -> Description:
        """The architecture as a planner's input."""
        return Description(self.name, self.root(), (self.block(),) * self.layers, architecture=self)

    def with_adapters(self, rank: int) -> Description:
        """The same with its weights frozen and low-rank adapters of `rank` beside every matrix of the blocks (LoRA, arXiv 2106.09685)."""
        whole(rank=rank)
        block, root = self.block(), self.root()
        small = tuple(shape for rows, columns in (shape for shape in block.shapes if len(shape) == 2)
                      for shape in ((rank, columns), (rows, rank)))
        adapted = Part(block.name, small, block.shapes)
        return Description(f"{self.name} with adapters of rank {rank}", Part(root.name, (), root.shapes), (adapted,) * self.layers,
                           architecture=self)

    @property
    def parameters(self) -> int:
        """How many parameters, each once."""
        return self.root().parameters + self.layers * self.block().parameters

    def flops_per_token(self, sequence: int) -> float:
        """FLOP of forward and backward for one token in a sequence of `sequence`, without recomputation.

        6 a weight that is multiplied (not the looked-up embedding), and 12 L h s for attention scores and their use (PaLM, arXiv
        2204.02311, appendix B; what torchtitan counts). Causal kernels may skip half of the latter; the convention counts it whole.
        """
        return 3 * (self.layers * self.block_flops(sequence) + self.head_flops())

    def block_flops(self, sequence: int) -> float:
        """FLOP of one block's forward for one token."""
        matrices = sum(math.prod(shape) for shape in self.block().shapes if len(shape) == 2)
        return 2 * matrices + 4 * self.dim * sequence

    def head_flops(self) -> float:
        """FLOP of the head's forward for one token."""
        return 2.0 * self.vocab * self.dim
