"""What a choice of units will cost under ZeRO-3, before anything runs: bytes at the worst moment of a step, and seconds of waiting.

wrap.py compares choices with it. It only reads shapes, so a model on the meta device will do. It must never run the model.

[Note: the memory of a step] What a rank holds at the worst moment, when backward of some unit begins or ends (see engine/schedule.py):

    at rest      shards of weights and gradients, and AdamW's moments: 16 P / N bytes for P fp32 parameters on N ranks
    whole        weights and gradients of this unit and of those around it (the root is around all, and whole until the end)
    buffers      the gather of the unit that backward meets next, and one reduction with the shards that arrive: the one that was started
                 last when a unit begins, its own when it ends (its weights are free then, its gradients not yet)

All gradients count as there, as when they accumulate over several backwards; in a step that began with zero_grad the last few are not
yet. Left out: activations (the same whatever the units are), the model's buffers, casts of shards on their way to a gather, what the
allocator keeps for itself.

[Note: exposed time] While a unit computes, the next one is gathered, and in backward the one before it reduced; what takes longer than
the compute is exposed. Nothing hides the root's gathers (before forward and before backward), the first unit's in forward, and the last
two reductions. A message takes latency + bytes (N-1)/N / bandwidth. Forward takes 2 FLOP a weight and token, backward 4; only matrices
count, and not those that are looked up (embeddings). Attention scores and convolutions do more than that, so they hide more.

Units are taken to run in the order of modules, once a step. A unit whose inputs need no gradient ends late ([Note: when the inputs need
no gradient]); that is left out too, and was at most 8 % of the peak in an encoder-decoder cut into its smallest layers.
"""

from __future__ import annotations

from collections import Counter

from torch import nn

from .placements import chunk_rows
from .policies import MixedPrecisionPolicy
from .rows import Category, wire_bytes
from .wire import Link


def sizes(model: nn.Module, units: list[nn.Module], world_size: int, policy: MixedPrecisionPolicy) -> dict[nn.Module, Counter]:
    """What the root and each unit (`units`: innermost first) come to, in the order of modules.

    A value holds bytes on a rank by category, padding included, "arriving": bytes of a reduction's result, and "work": FLOP for one
    token in forward.
    """
    taken, found = set(), {}
    multiplied = {param for module in model.modules() if not isinstance(module, nn.Embedding) for param in module._parameters.values()}
    for unit in (*units, model):                                                    # inner units first: the outer one takes the rest
        found[unit] = Counter()
        for param in (param for param in unit.parameters() if param not in taken):
            taken.add(param)
            found[unit].update(_bytes_of(param, world_size, policy))
            found[unit]["work"] += 2 * param.numel() if param in multiplied and param.dim() > 1 else 0
    return dict(reversed(found.items()))


def _bytes_of(param: nn.Parameter, world_size: int, policy: MixedPrecisionPolicy) -> dict[Category | str, int]:
    rows = max(1, *param.shape[:1])
    padded = chunk_rows(rows, world_size, 0)[0] * world_size * param.numel() // rows                    # elements
    shard = padded // world_size * param.element_size()
    dtype = policy.param_dtype if policy.param_dtype and param.is_floating_point() else param.dtype
    whole = padded * dtype.itemsize
    found = {Category.SHARDED_PARAM: shard, Category.UNSHARDED_PARAM: whole, Category.ALL_GATHER: whole}
    if param.requires_grad:
        reduced = padded * (policy.reduce_dtype or dtype).itemsize
        found |= {Category.SHARDED_GRAD: shard, Category.OPTIMIZER: 2 * shard, Category.UNSHARDED_GRAD: param.numel() * dtype.itemsize,
                  Category.REDUCE_SCATTER: reduced, "arriving": reduced // world_size if world_size > 1 else 0}
    return found


def held(sizes: dict[nn.Module, Counter]) -> Counter[Category]:
    """Bytes on a rank at the worst moment, by category. [Note: the memory of a step]"""
    order, moments = list(sizes), []
    inside = {unit: set(unit.modules()) for unit in order}
    at_rest = (Category.SHARDED_PARAM, Category.SHARDED_GRAD, Category.OPTIMIZER)
    rest = {kind: sum(size[kind] for size in sizes.values()) for kind in at_rest}
    for index, unit in enumerate(order):
        around, later = [other for other in order[: index + 1] if unit in inside[other]], order[index + 1 :]
        before = [other for other in order[:index] if other not in around]
        within = [other for other in later if other in inside[unit]]
        begins = around, (within or before)[-1:], [other for other in later if other not in within][:1]
        ends = around[:-1], before[-1:], [unit]
        for whole, gathered, reduced in (begins, ends):
            live = {Category.UNSHARDED_PARAM: whole, Category.UNSHARDED_GRAD: around, Category.ALL_GATHER: gathered,
                    Category.REDUCE_SCATTER: reduced}
            moment = Counter(rest | {kind: sum(sizes[each][kind] for each in those) for kind, those in live.items()})
            moment[Category.SHARDED_GRAD] += sum(sizes[each]["arriving"] for each in reduced)
            moments.append(moment)
    return max(moments, key=Counter.total)


def exposed(sizes: dict[nn.Module, Counter], link: Link, world_size: int, seconds_a_flop: float) -> float:
    """Seconds a step that compute waits for communication, if a FLOP takes a rank `seconds_a_flop` for its whole batch.

    [Note: exposed time]
    """
    def seconds(name: str, nbytes: int) -> float:
        return link.seconds(wire_bytes(name, nbytes, world_size)) if nbytes else 0.0               # nothing to send: no message

    gathers = [seconds("all-gather", size[Category.ALL_GATHER]) for size in sizes.values()]
    reductions = [seconds("reduce-scatter", size[Category.REDUCE_SCATTER]) for size in sizes.values()]
    compute = [size["work"] * seconds_a_flop for size in sizes.values()]
    forward = sum(max(0.0, gather - hidden) for gather, hidden in zip(gathers, [0.0, 0.0, *compute[1:]], strict=False))
    backwards = [0, *range(len(sizes) - 1, 0, -1)]                                  # the root begins, then the last unit, ..., the first
    ahead = [*(gathers[index] for index in backwards[1:]), 0.0]
    behind = [0.0, 0.0, *(reductions[index] for index in backwards[1:])]
    backward = sum(max(0.0, gather + reduction - 2 * compute[index])
                   for index, gather, reduction in zip(backwards, ahead, behind, strict=False))
    return forward + gathers[0] + backward + sum(reductions[:2])
