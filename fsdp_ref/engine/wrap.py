"""Which modules become units. A unit should be large enough to make one worthwhile message and small enough to be whole in memory.

The functions only choose; `data_parallel` applies them bottom-up and makes the root the unit of what is left.
"""

from __future__ import annotations

from torch import nn


def by_class(model: nn.Module, *classes: type[nn.Module]) -> list[nn.Module]:
    """Every submodule that is an instance of one of `classes`, innermost first."""
    return [module for module in reversed(list(model.modules())) if isinstance(module, classes) and module is not model]


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: the elements of its `nn.ModuleList`s that have parameters, innermost first.

    Transformers keep their blocks in one; a model without any becomes a single unit (the root).
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    found = [block for holder in lists for block in holder if next(block.parameters(), None) is not None]
    return list(reversed(found))
