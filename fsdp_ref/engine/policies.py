"""What the user decides once per unit: dtypes, and where shards rest. Plain frozen values with torch's own names and meaning.

Sources: `MixedPrecisionPolicy`, `OffloadPolicy`, `CPUOffloadPolicy` of torch/distributed/fsdp/_fully_shard/_fsdp_api.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of one unit. The shards, and so the optimizer, always keep the parameter's own dtype.

    Attributes:
        param_dtype: dtype of the gathered weights, and so of compute and of the all-gather (None: the parameter's own).
        reduce_dtype: dtype of the gradient reduction (None: that of the gradients, which is param_dtype).
        output_dtype: floating-point outputs of forward are cast to it (None: left alone).
        cast_forward_inputs: cast floating-point inputs of forward to param_dtype.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """Shards rest on the device that computes."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and optimizer state rest in host memory; units are copied to the device when they are gathered.

    Attributes:
        pin_memory: page-lock the host memory, so that copies overlap with compute (more speed, less swappable memory).
    """

    pin_memory: bool = True


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
