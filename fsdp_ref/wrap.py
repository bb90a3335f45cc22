"""Which modules become units. A unit should be large enough to make one worthwhile message and small enough to be whole in memory.

    data_parallel(model, ZERO3, units=wrap.blocks(model))                                   the repeated blocks (the default)
    wrap.by_class(model, nn.Linear), wrap.by_size(model, 1_000_000)                         by kind, by size
    print(wrap.auto(model, budget=2 * 2**30, world_size=8))                                 from a target, and it says why

The functions only choose: they change nothing and work on the meta device. `data_parallel` applies them bottom-up and makes the root
the unit of what is left. What `auto` knows of costs comes from forecast.py.

[Note: what can be a unit] A unit's hooks run when its module is called, and it takes every parameter below it. So a module is left alone
when it has no forward of its own (`nn.ModuleList`); when a module around it reads its weights without calling it (`READS_CHILDREN`); and
when a parameter inside is also used outside: a tied parameter belongs to one unit, which must hold all its uses.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from . import forecast
from .errors import ConfigError
from .policies import MixedPrecisionPolicy
from .rows import Category
from .wire import Link

# Their forward hands the weights of their children to one fused function (the encoder layer: in evaluation).
READS_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


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


def by_size(model: nn.Module, min_params: int = 1_000_000, *, exclude: tuple[type[nn.Module], ...] = ()) -> list[nn.Module]:
    """Every submodule of which at least `min_params` elements are left when the units inside it are taken out, innermost first.

    Children are asked before their parents, so units come out about as small as `min_params` allows. The idea is that of
    `size_based_auto_wrap_policy` (torch/distributed/fsdp/wrap.py). Which modules are never taken: [Note: what can be a unit].

    Args:
        exclude: classes that do not become a unit; modules inside them may.

    Raises:
        ConfigError: `min_params` below 1.
    """
    if min_params < 1:
        raise ConfigError(f"min_params is {min_params} and a unit needs a parameter; give 1 or more")
    possible, units, taken = _possible(model), [], set()
    for module in reversed(list(model.modules())):                                  # children before their parents
        left = {param for param in module.parameters() if param not in taken}
        if module in possible and not isinstance(module, exclude) and sum(param.numel() for param in left) >= min_params:
            units.append(module)
            taken |= left
    return units


@dataclass(frozen=True)
class Choice:
    """What `auto` chose: pass it on as `units`, print it to read why.

    Attributes:
        name: the rule that gives these units.
        units: the modules, innermost first (iterating over the choice gives them too).
        held: predicted bytes on a rank at the worst moment, by category; `held.total()` is the peak. [Note: the memory of a step]
        exposed: predicted seconds a step that compute waits for communication; nan without a link. [Note: exposed time]
        explanation: why these, with the figures of everything that was tried.
    """

    name: str
    units: list[nn.Module]
    held: Counter[Category]
    exposed: float
    explanation: str = ""

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.units)

    def __str__(self) -> str:
        return self.explanation


def auto(model: nn.Module, budget: float | None = None, *, world_size: int, exposed: float | None = None, bandwidth: float | None = None,
         latency: float = 0.0, flops: float | None = None, tokens: int | None = None,
         mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy()) -> Choice:
    """Choose units for ZeRO-3 on `world_size` ranks from a target, and explain the choice.

    Tried are: the root alone; `by_size` with the size of every module as threshold; `by_class` of every class. Of those that keep to the
    budget the coarsest is taken (few, large messages); with `exposed`, the one that waits least.

    Args:
        budget: bytes that a rank may hold at the worst moment of a step. [Note: the memory of a step]
        exposed: seconds a step that compute may wait for communication; float("inf") asks for the least. [Note: exposed time]
        bandwidth, latency: the link, in bytes/s and in seconds a message.
        flops, tokens: the compute to hide behind: FLOP/s that a rank reaches, and tokens in its batch.

    Raises:
        ConfigError: no target; a link without compute; a target that nothing meets (the message says what comes nearest).
    """
    link = (bandwidth, flops, tokens)
    if (budget is None and exposed is None) or (exposed is not None and bandwidth is None) or (bandwidth is not None and None in link):
        raise ConfigError("auto needs budget= in bytes or exposed= in seconds; exposed time also needs bandwidth=, flops= and tokens=")
    if not (world_size >= 1 and latency >= 0 and all(value is None or value > 0 for value in link)):
        raise ConfigError(f"{world_size=}, {bandwidth=}, {latency=}, {flops=}, {tokens=} cannot all be right; give positive numbers")
    tried = []
    for name, units in _candidates(model):
        sizes = forecast.sizes(model, units, world_size, mp_policy)
        wait = forecast.exposed(sizes, Link(bandwidth, latency), world_size, tokens / flops) if bandwidth else math.nan
        tried.append(Choice(name, units, forecast.held(sizes), wait))
    within = [choice for choice in tried if budget is None or choice.held.total() <= budget]
    if not within:
        least = min(tried, key=lambda choice: choice.held.total())
        raise ConfigError(f"no choice of units keeps each of {world_size} ranks within {budget:.0f} bytes; the smallest budget that works "
                          f"is {least.held.total()} bytes, with {least.name}: {_pieces(least)}")
    best = min(within, key=lambda choice: (0 if exposed is None else choice.exposed, len(choice.units), choice.held.total()))
    if exposed is not None and best.exposed > exposed:
        raise ConfigError(f"no choice of units leaves at most {1e3 * exposed:.3f} ms a step exposed; {best.name} comes nearest with "
                          f"{1e3 * best.exposed:.3f} ms, and only a faster link or more tokens a rank would hide more")
    why = f"the coarsest within {budget / 2**20:.3f} MiB a rank" if exposed is None else "the one that leaves least exposed"
    rows = [f"  {'tried':<36}{'units':>6}{'MiB a rank':>14}{'ms exposed':>14}   (the root is one more unit; nan: no link given)"]
    rows += [f"  {c.name:<36}{len(c.units):>6}{c.held.total() / 2**20:>14.3f}{1e3 * c.exposed:>14.3f}" for c in tried]
    text = f"{best.name}: {why}, on {world_size} ranks. At the worst moment each holds, besides activations, {_pieces(best)}."
    return replace(best, explanation="\n".join([text, *rows]))


def _pieces(choice: Choice) -> str:
    return " + ".join(f"{kind} {nbytes / 2**20:.3f}" for kind, nbytes in choice.held.items()) + f" = {choice.held.total() / 2**20:.3f} MiB"


def _possible(model: nn.Module) -> set[nn.Module]:
    """[Note: what can be a unit]"""
    def uses(module: nn.Module) -> Counter:
        return Counter(param for _, param in module.named_parameters(remove_duplicate=False))

    places, everywhere = Counter(module for _, module in model.named_modules(remove_duplicate=False)), uses(model)
    read = {inner for outer in model.modules() if isinstance(outer, READS_CHILDREN) for inner in outer.modules() if inner is not outer}
    return {module for module in places if module is not model and module not in read and type(module).forward is not nn.Module.forward
            and (inside := uses(module)) and all(count * places[module] == everywhere[param] for param, count in inside.items())}


def _candidates(model: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    """What `auto` tries, coarse to fine, each set of units once."""
    possible = _possible(model)
    kinds = dict.fromkeys(type(module) for module in model.modules() if module in possible)
    named = [(f"by_class({kind.__name__})", [module for module in by_class(model, kind) if module in possible]) for kind in kinds]
    counts = {sum(param.numel() for param in module.parameters()) for module in possible}
    named += [(f"by_size({count})", by_size(model, count)) for count in sorted(counts)] + [("the root alone", [])]
    return sorted({frozenset(units): (name, units) for name, units in reversed(named)}.values(), key=lambda pair: len(pair[1]))
