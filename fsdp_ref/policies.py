"""What the user decides once per unit: dtypes, and where shards rest. Plain frozen values with torch's own names and meaning.

Sources: `MixedPrecisionPolicy`, `OffloadPolicy`, `CPUOffloadPolicy` of torch/distributed/fsdp/_fully_shard/_fsdp_api.py.
"""

from __future__ import annotations

from dataclasses import dataclass

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
