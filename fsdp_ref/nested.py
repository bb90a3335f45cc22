"""Tensors inside nested values: what modules take and return may be tuples, dicts, dataclasses, and these inside each other.

Also `outside_transforms`, for what torch.func would otherwise nest in its own wrappers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with `change` applied to every tensor in it: tuples, named tuples, lists, dicts and dataclasses, nested.

    A container in which nothing changes is returned as it is, not as a copy: forward may write into it (a cache, say).
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(change, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        changed = {key: new for key, old in value.items() if (new := map_tensors(change, old)) is not old}
        if not changed:
            return value
        copy = value.copy()                                       # keeps the type: OrderedDict, transformers' ModelOutput, ...
        for key, item in changed.items():
            copy[key] = item
        return copy
    if is_dataclass(value) and not isinstance(value, type):
        old = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        changed = {name: new for name, item in old.items() if (new := map_tensors(change, item)) is not item}
        return replace(value, **changed) if changed else value
    return value


def cast_floats(dtype: torch.dtype, value: Any) -> Any:
    """`value` with its floating-point tensors cast to `dtype`; integers and masks stay."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t, value)


def need_gradient(value: Any) -> list[torch.Tensor]:
    """The tensors in `value` that need a gradient, in the order `map_tensors` meets them."""
    found: list[torch.Tensor] = []
    map_tensors(lambda t: found.append(t) or t if t.requires_grad else t, value)
    return found


def outside_transforms(method: Callable) -> Callable:
    """torch.func's transforms (grad, jvp, vmap) follow what a model computes; that its weights come and go is none of their business."""
    @functools.wraps(method)
    def plain(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._are_functorch_transforms_active():
            return method(*args, **kwargs)
        with torch._C._DisableFuncTorch():
            return method(*args, **kwargs)
    return plain
