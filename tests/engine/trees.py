"""Models of many shapes for the tests that choose units, with a batch for each, the same in every process."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_ref.models import GPT, GPTConfig


def gpt(tied=True, layers=3, dim=16):
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab=40, context=12, dim=dim, layers=layers, heads=2, tied=tied))


def sequential(*widths):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)))


def transformer():
    torch.manual_seed(0)
    return nn.Transformer(d_model=16, nhead=2, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=24, dropout=0.0,
                          batch_first=True)


class Shared(nn.Module):
    """One layer that stands in two blocks, and one parameter that is tied between two others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        twice = nn.Linear(8, 8)
        self.left, self.right = nn.Sequential(twice, nn.Linear(8, 8)), nn.Sequential(twice, nn.Linear(8, 8))
        self.pair = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 8))
        self.pair[1].weight = self.pair[0].weight

    def forward(self, x):
        return self.pair(self.left(x) + self.right(x))


MODELS = {"gpt": gpt, "untied": lambda: gpt(tied=False), "sequential": lambda: sequential(8, 40, 8, 24), "transformer": transformer,
          "shared": Shared, "one layer": lambda: sequential(9, 9)[0]}


def names(model, units):
    known = {module: name for name, module in model.named_modules()}
    return [known[unit] for unit in units]


def batch(model, step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    if isinstance(model, GPT):
        return (torch.randint(40, (2, 12), generator=generator),)
    if isinstance(model, nn.Transformer):
        return torch.randn(2, 5, 16, generator=generator), torch.randn(2, 4, 16, generator=generator)
    first = next(module for module in model.modules() if isinstance(module, nn.Linear))
    return (torch.randn(4, first.in_features, generator=generator),)


def rows_of(choice):
    """(rule, units, MiB, ms) of every line of the explanation's table."""
    lines = [line.rsplit(None, 3) for line in str(choice).splitlines()[2:]]
    return [(name.strip(), int(units), float(mib), float(ms)) for name, units, mib, ms in lines]
