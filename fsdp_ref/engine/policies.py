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
    """`value` with `change` applied to every tensor in it: tuples, named tuples, lists, dicts and dataclasses, nested."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(change, item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(change, item) for item in value)
    if isinstance(value, dict):
        copy = value.copy()                                       # keeps the type: OrderedDict, transformers' ModelOutput, ...
        for key, item in value.items():
            copy[key] = map_tensors(change, item)
        return copy
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: map_tensors(change, getattr(value, f.name)) for f in fields(value) if f.init})
    return value


def cast_floats(dtype: torch.dtype, value: Any) -> Any:
    """`value` with its floating-point tensors cast to `dtype`; integers and masks stay."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t, value)
