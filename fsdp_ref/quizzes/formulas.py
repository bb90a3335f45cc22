"""The numbers of the questions, computed by the package itself: a figure that the planner or the ladder changes changes here too.

A question names one of `FORMULAS` and gives its arguments; what it says of itself is in the function's docstring. These are the only
functions a question file can reach. None of them may read a file, start a process or take long.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

from ..errors import ConfigError, FsdpRefError
from ..interval import young
from ..placements import LADDER, Placement, Placements, chunk_rows
from ..plan.footprint import memory
from ..plan.presets import preset
from ..plan.strategy import DTYPES
from ..rows import wire_bytes

STAGES: dict[str, Placements] = {row.name.lower().replace("-", ""): row for row in LADDER}


def at_rest(stage: str, ranks: int, parameter: int = 4, gradient: int = 4, optimizer: int = 8) -> float:
    """Bytes a parameter that one rank holds at rest under a row of the ladder."""
    return STAGES[stage].bytes_per_parameter(ranks, parameter=parameter, gradient=gradient, optimizer=optimizer)


def saved(stage: str, other: str, ranks: int) -> float:
    """Bytes a parameter at rest that row `other` saves a rank against row `stage`."""
    return at_rest(stage, ranks) - at_rest(other, ranks)


def gigabytes(billions: float, bytes_each: float, ranks: int = 1) -> float:
    """GB (10^9 bytes) of so many billion parameters, divided by `ranks`."""
    return billions * bytes_each / ranks


def dtypes_at_rest(name: str) -> float:
    """Bytes a parameter at rest under one of the planner's dtype policies, all ranks together."""
    return float(DTYPES[name].at_rest)


def sent(collective: str, size: float, ranks: int, times: float = 1) -> float:
    """What one rank sends for a collective of a message of `size`, in the unit of `size`, `times` over."""
    return times * wire_bytes(collective, size, ranks)


def sent_in_a_step(stage: str, size: float, ranks: int, reshard: bool = True) -> float:
    """What one rank sends in one step whose weights have `size`; `reshard`: ZeRO-3 frees weights after forward and gathers twice."""
    row = STAGES[stage]
    if row.optimizer is Placement.REPLICATE:
        return wire_bytes("all-reduce", size, ranks)
    gathers = 1 if row.parameter is Placement.REPLICATE else 1 + reshard
    return gathers * wire_bytes("all-gather", size, ranks) + wire_bytes("reduce-scatter", size, ranks)


def rows_of(rows: int, ranks: int, rank: int) -> float:
    """Real rows of a parameter that one rank holds."""
    return float(chunk_rows(rows, ranks, rank)[2])


def last_rows(rows: int, ranks: int) -> float:
    """Real rows of the last rank."""
    return rows_of(rows, ranks, ranks - 1)


def first_rows(rows: int, ranks: int) -> float:
    """Real rows of rank 0: a full chunk."""
    return rows_of(rows, ranks, 0)


def padding(rows: int, ranks: int) -> float:
    """Rows of padding on all ranks together."""
    return float(chunk_rows(rows, ranks, 0)[0] * ranks - rows)


def files_read(rows: int, saved: int, ranks: int, rank: int) -> float:
    """From how many of `saved` ranks' shards rank `rank` of `ranks` takes rows when it loads a parameter."""
    if not 1 <= saved <= 10_000:
        raise ValueError(f"{saved} ranks")
    _, first, mine = chunk_rows(rows, ranks, rank)
    spans = [chunk_rows(rows, saved, each)[1:] for each in range(saved)]
    return float(sum(max(first, start) < min(first + mine, start + count) for start, count in spans))


def mean(tokens: list[int], losses: list[float]) -> float:
    """The mean loss a token of ranks or micro-batches with so many tokens and these mean losses."""
    return sum(n * loss for n, loss in zip(tokens, losses, strict=True)) / sum(tokens)


def two_means(tokens: int, other_tokens: int, loss: float, other_loss: float) -> float:
    """`mean` of two."""
    return mean([tokens, other_tokens], [loss, other_loss])


def mean_of_means(loss: float, other_loss: float) -> float:
    """What two ranks get that average their means."""
    return (loss + other_loss) / 2


def mean_too_high(tokens: int, other_tokens: int, loss: float, other_loss: float) -> float:
    """By how much the mean of two means is above the mean."""
    return mean_of_means(loss, other_loss) - two_means(tokens, other_tokens, loss, other_loss)


def global_norm(norm: float, other_norm: float) -> float:
    """The norm of a gradient of which two ranks hold parts with these norms."""
    return math.hypot(norm, other_norm)


def clip_factor(norm: float, other_norm: float) -> float:
    """What a gradient in two parts is scaled with to clip it to norm 1."""
    return min(1.0, 1 / global_norm(norm, other_norm))


def total(parts: list[float], factor: float = 1) -> float:
    """`factor` times the sum of the parts."""
    return factor * sum(parts)


def one_over_sum(parts: list[float]) -> float:
    """1 over the sum of the parts."""
    return 1 / sum(parts)


def largest(parts: list[float]) -> float:
    """The largest of the parts."""
    return max(parts)


def product(factors: list[float]) -> float:
    """The product of the factors."""
    return math.prod(factors)


def quotient(over: list[float], under: list[float]) -> float:
    """The product of one list over that of the other."""
    return math.prod(over) / math.prod(under)


def root(factors: list[float]) -> float:
    """The square root of the product of the factors."""
    return math.sqrt(math.prod(factors))


def weights_in_forward(blocks: int, size: float, ranks: int, ahead: int = 0) -> float:
    """The most weights a rank holds in forward: shards of equal blocks, one block whole, and `ahead` blocks gathered early."""
    return blocks * size / ranks + (1 + ahead) * size


def exposed(gather: float, compute: float, blocks: int = 1) -> float:
    """Time that compute waits for gathers which run beside it, for so many blocks."""
    return blocks * max(0.0, gather - compute)


def link_time(size: float, bandwidth: float, latency: float, ranks: int) -> float:
    """Time of an all-gather on a link: latency + what a rank sends / bandwidth, all in the same unit of time."""
    return latency + wire_bytes("all-gather", size, ranks) / bandwidth


def save_interval(stall: float, mtbf: float) -> float:
    """Young's interval between two checkpoints, in the unit of `stall` and `mtbf`."""
    return young(stall, mtbf)


def state_gb(model: str, gpus: int, stage: str = "zero3") -> float:
    """GB that weights, gradients and optimizer of a preset take at rest on one of `gpus` GPUs (the planner, dtypes fsdp)."""
    kinds = ("sharded parameter", "unsharded parameter", "sharded gradient", "unsharded gradient", "optimizer state")
    plan = memory(model, gpus=gpus, stage=stage, runtime=False)
    return sum(plan.of(kind) for kind in kinds) / 1e9


def weights_gb(model: str, gpus: int, bytes_each: float) -> float:
    """GB of a preset's weights alone on one of `gpus` GPUs."""
    return preset(model).parameters * bytes_each / gpus / 1e9


FORMULAS: dict[str, Callable[..., float]] = {f.__name__: f for f in (
    at_rest, saved, gigabytes, dtypes_at_rest, sent, sent_in_a_step, rows_of, last_rows, first_rows, padding, files_read, two_means,
    mean_of_means, mean_too_high, global_norm, clip_factor, total, one_over_sum, largest, product, quotient, root, weights_in_forward,
    exposed, link_time, save_interval, state_gb, weights_gb)}


def arguments(name: str, given: dict[str, object], drawn: dict[str, object]) -> dict[str, object]:
    """What a formula is called with: the drawn numbers it has a place for, and what is given, where a drawn number's name stands for it."""
    places = inspect.signature(FORMULAS[name]).parameters if name in FORMULAS else {}

    def fill(value: object) -> object:
        if isinstance(value, list):
            return [fill(each) for each in value]
        return drawn.get(value, value) if isinstance(value, str) else value

    return {**{key: value for key, value in drawn.items() if key in places}, **{key: fill(value) for key, value in given.items()}}


def compute(name: str, given: dict[str, object]) -> float:
    """The value of a formula.

    Raises:
        ConfigError: no such formula, or arguments that it does not take.
    """
    if name not in FORMULAS:
        raise ConfigError(f"there is no formula {name!r:.40}; choose one of {', '.join(sorted(FORMULAS))}")
    try:
        return float(FORMULAS[name](**given))
    except (TypeError, AttributeError, KeyError, ArithmeticError, ValueError, FsdpRefError) as error:
        raise ConfigError(f"formula {name} cannot take {given!r:.120} ({type(error).__name__}: {error}); see its signature in "
                          "fsdp_ref/quizzes/formulas.py") from error
