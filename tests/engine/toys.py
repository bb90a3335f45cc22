"""Small models and batches with awkward sizes, the same on every rank and in every process."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Toy(nn.Module):
    """Token embedding, blocks, norm, head. Odd sizes: 2, 3 and 4 ranks shard unevenly, and some shards are empty."""

    def __init__(self, vocab: int = 17, dim: int = 6, hidden: int = 10, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.gain


def toy(seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: int) -> Toy:
    torch.manual_seed(seed)
    return Toy(**sizes).to(dtype)


def batch(step: int, rank: int, vocab: int = 17, size: tuple[int, int] = (3, 5)) -> torch.Tensor:
    """Tokens of one rank's batch: another for every step and rank."""
    return torch.randint(vocab, size, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(model: nn.Module, rank: int, steps: int = 3, lr: float = 0.01) -> list[float]:
    """AdamW steps on this rank's batches; the losses."""
    return train_with(torch.optim.AdamW(model.parameters(), lr=lr), model, rank, steps)


def train_with(optimizer: torch.optim.Optimizer, model: nn.Module, rank: int, steps: int = 3) -> list[float]:
    """Steps of any optimizer on this rank's batches; the losses."""
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step, rank))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
