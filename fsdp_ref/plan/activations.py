"""What autograd keeps for backward in a transformer block, term by term, in bytes.

Korthikanti et al. (arXiv 2205.05198, section 4) derive s b h (10 + 24/t + 5 a s / (h t)) bytes for a GPT block in 16 bits with tensor
parallelism t, and the same for its relatives. The terms below are theirs, written so that grouped heads, gated MLPs, models without
dropout and flash attention are other numbers in the same lines. With GPT's numbers the sum is their formula exactly (tests, and
`fsdp-ref plan validate`); for our own GPT it is what autograd really saves (tests count the saved tensors on meta).

Letters: s tokens of a sequence, b sequences, h width, a heads, f MLP width, t tensor-parallel ranks, e bytes of an element.

[Note: scores] A kernel that stores attention scores keeps a s^2 b elements twice and a mask of one byte: 5 a s^2 b bytes, which grows with
the square of the sequence. Flash attention keeps one fp32 number a row instead. "Selective" recomputation drops the same term, so it
gains nothing on top of flash attention (Megatron-LM #1225).
"""

from __future__ import annotations

from .architecture import Architecture
from .strategy import Strategy

Terms = dict[str, float]


def block(shape: Architecture, tokens: float, sequence: float, *, tensor: int = 1, sequence_parallel: bool = False, scores: bool = False,
          width: int = 2) -> Terms:
    """Bytes kept for one block, by term.

    Args:
        tokens: on this rank, s b (divided by the context-parallel ranks).
        sequence: tokens that attention looks at.
        scores: True when attention scores are stored. [Note: scores]
        width: bytes of an element.
    """
    h, t = shape.dim, tensor
    around = t if sequence_parallel else 1                                  # who shares norms, dropouts and the inputs of matrices
    masks = 1 if shape.dropout else 0
    terms = {
        "inputs of the two norms": 2 * width * tokens * h / around,
        "inputs of attention and MLP": 2 * width * tokens * h / around,
        "queries, keys, values": width * tokens * (h + 2 * shape.kv_dim) / t,
        "output of attention": width * tokens * h / t,
        "inside the MLP": (4 if shape.gated else 2) * width * tokens * shape.ffn / t,
        "dropout masks": 2 * masks * tokens * h / around,
    }
    if scores:
        terms["attention scores"] = (width + masks * (width + 1)) * shape.heads * tokens * sequence / t
    else:
        terms["row sums of flash attention"] = 4 * shape.heads * tokens / t
    return {name: value for name, value in terms.items() if value}


def of_block(shape: Architecture, strategy: Strategy, sequence: int) -> Terms:
    """The same for one micro-batch under `strategy`, without recomputation of whole blocks."""
    tokens = strategy.micro_batch * sequence / strategy.context
    stores = not strategy.flash and strategy.recompute != "selective"
    return block(shape, tokens, sequence, tensor=strategy.tensor, sequence_parallel=strategy.splits_sequence, scores=stores,
                 width=strategy.bytes_of.compute)


def block_input(shape: Architecture, tokens: float, width: int = 2) -> float:
    """Bytes of what full recomputation keeps of a block: its input, s b h elements (Korthikanti et al., section 5)."""
    return float(width * tokens * shape.dim)


def logits(shape: Architecture, tokens: float, tensor: int = 1, width: int = 2) -> tuple[float, float]:
    """Bytes of logits and loss, at least and at most: the logits and their log-softmax in fp32, and the gradient of the latter."""
    elements = tokens * shape.vocab / tensor
    if shape.patch:
        elements /= shape.context                                           # one row of classes an image
    return elements * (width + 4), elements * (width + 8)


def in_flight(strategy: Strategy, index: int) -> float:
    """Micro-batches, weighed by the share of the stage's blocks they went through, whose activations stage `index` holds at its worst.

    GPipe holds all m; 1F1B min(m, p - index) (Megatron-LM, arXiv 2104.04473, section 2.2.1); interleaved holds chunks of 1/v of the
    stage: 2 (p - index - 1) + (v - 1) p + 1 of them, L (1 + (p-1)/(p v)) blocks' worth on the first (Korthikanti et al., section 4.3).
    """
    p, m, v = strategy.pipeline, strategy.micro_batches, strategy.chunks
    if p == 1:
        return 1
    if strategy.schedule == "gpipe":
        return m
    if strategy.schedule == "interleaved" and v > 1:
        return min(m, (2 * (p - index - 1) + (v - 1) * p + 1) / v)
    return min(m, p - index)
