"""A small GPT, plain enough to read in five minutes: what every lesson, test and benchmark shards.

Bytes in, next-byte logits out. Pre-norm blocks, learned positions, causal attention, a GELU MLP (Radford et al. 2019; the layout
of minGPT). The model knows nothing of ranks: whoever shards it asks `units()` which modules to shard one by one; what is left
over (embeddings, last norm, head) belongs to the root. It must never bypass `forward`: sharding hooks in there.

Letters in the shape comments: B batch, T time (bytes), C channels (`dim`), H heads, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from .errors import ConfigError


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model.

    Attributes:
        vocab: number of tokens; 256 for bytes.
        context: longest input, in tokens.
        dim: width of the residual stream; a multiple of `heads`.
        layers: number of blocks.
        heads: attention heads in each block.
        dropout: share of activations set to zero in training (after attention, after the MLP and on the embeddings).
        tied: True when the head uses the token embedding's matrix (Press and Wolf 2017).
    """

    vocab: int = 256
    context: int = 64
    dim: int = 128
    layers: int = 4
    heads: int = 4
    dropout: float = 0.0
    tied: bool = True

    def __post_init__(self) -> None:
        for name in ("vocab", "context", "dim", "layers", "heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.dim % self.heads:
            raise ConfigError(f"dim {self.dim} cannot be cut into {self.heads} equal heads; make it a multiple of {self.heads}")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout is {self.dropout}; it must be at least 0 and below 1")

    def parameters(self) -> int:
        """How many parameters the model has: 12 C^2 + 13 C a block, and the embeddings, the last norm and the head."""
        block = 12 * self.dim**2 + 13 * self.dim
        head = 0 if self.tied else self.vocab * self.dim
        return self.layers * block + (self.vocab + self.context) * self.dim + 2 * self.dim + head


class Attention(nn.Module):
    """Causal self-attention: each byte looks at itself and at what came before."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.proj = nn.Linear(config.dim, config.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix each position with those before it: (B, T, C) -> (B, T, C)."""
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)     # 3 x (B, H, T, C/H)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)              # (B, H, T, C/H)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))                                        # (B, T, C)


class MLP(nn.Module):
    """Four times as wide inside, GELU between."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, 4 * config.dim)
        self.down = nn.Linear(4 * config.dim, config.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))                 # (B, T, C) -> (B, T, 4C) -> (B, T, C)


class Block(nn.Module):
    """Norm, attention, add; norm, MLP, add. The natural unit to shard: 12 C^2 + 13 C parameters that are used together."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.dim)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attn(self.norm1(x)))          # (B, T, C)
        return x + self.drop(self.mlp(self.norm2(x)))        # (B, T, C)


class GPT(nn.Module):
    """A stack of blocks between an embedding and a head.

    >>> GPT(GPTConfig(dim=32, layers=2, heads=2))(torch.zeros(1, 8, dtype=torch.long)).shape
    torch.Size([1, 8, 256])
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.dim)
        self.positions = nn.Embedding(config.context, config.dim)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self.apply(self._initialize)
        for block in self.blocks:                            # each block adds twice to the stream: keep its variance near 1 (GPT-2)
            for linear in (block.attn.proj, block.mlp.down):
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * config.layers))
        if config.tied:
            self.head.weight = self.tokens.weight

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def units(self) -> list[nn.Module]:
        """The modules to shard one by one, in the order they run; the rest belongs to the root."""
        return list(self.blocks)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits `(B, T, V)` of the next token at every position of `tokens` `(B, T)` (int64, T at most `context`).

        Raises:
            ConfigError: the input is longer than the context.
        """
        T = tokens.shape[1]
        if T > self.config.context:
            raise ConfigError(f"the input has {T} tokens and the model's context is {self.config.context}; "
                              "cut the input or build a longer model")
        x = self.tokens(tokens) + self.positions(torch.arange(T, device=tokens.device))    # (B, T, C) + (T, C)
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)                                     # (B, T, C)
        return self.head(self.norm(x))                       # (B, T, V)

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy in nats a token, a scalar. `tokens` and `targets`: `(B, T)`.

        Calls the model, not `forward`: sharding works through the hooks that a call runs.
        """
        logits = self(tokens)                                # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
