"""Let `torch.nn.utils.clip_grad_norm_` work on every model that this engine shards.

A gradient that is a DTensor gives the norm over all ranks by itself. Two cases end torch's function (2.13) with an error, in the first of
them on one rank only, so that the others wait: a rank that holds no row of some parameter has no largest element to report for the
infinity norm, and a list of gradients in which plain tensors (of ignored parameters) stand beside DTensors is refused. Both are mended on
the way in, by handlers for the four operations that clipping makes; what reaches torch's own code is always a list of DTensors.

    an empty shard          -> one zero in its place: it changes no norm
    a plain gradient        -> the same memory as a DTensor that every rank holds alike: counted once, scaled in place

The gradients of ignored parameters are taken to be equal on all ranks; this engine does not reduce them. With `foreach=False` torch scales
one gradient at a time and still refuses plain ones, on every rank.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

_aten = torch.ops.aten
_NORMS = (_aten._foreach_norm.Scalar, _aten.linalg_vector_norm.default)
_SCALES = (_aten._foreach_mul_.Tensor,)
_lock = threading.RLock()


def prepare() -> None:
    """Put the handlers in place, once a process. DTensor calls them instead of its own rule for these operations."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    for op in (*_NORMS, *_SCALES):
        handlers.setdefault(op, _mend)


def _mend(op: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run `op` with its first argument mended."""
    several = isinstance(args[0], (list, tuple))
    tensors = list(args[0]) if several else [args[0]]
    example = next((tensor for tensor in tensors if isinstance(tensor, DTensor)), None)
    if example is not None:
        tensors = [_as_dtensor(tensor, example) for tensor in tensors]
        if op in _NORMS:
            tensors = [_never_empty(tensor) for tensor in tensors]
    with _lock:
        handlers = DTensor._op_dispatcher._custom_op_handlers
        del handlers[op]                                    # now DTensor's own rule applies
        try:
            return op(tensors if several else tensors[0], *args[1:], **kwargs)
        finally:
            handlers[op] = _mend


def _as_dtensor(tensor: torch.Tensor, example: DTensor) -> DTensor:
    if isinstance(tensor, DTensor):
        return tensor
    mesh = example.device_mesh
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _never_empty(tensor: DTensor) -> DTensor:
    if tensor._local_tensor.numel():
        return tensor
    return DTensor.from_local(tensor._local_tensor.new_zeros((1,) * tensor.ndim), tensor.device_mesh, tensor.placements, run_check=False)
