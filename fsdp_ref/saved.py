"""Activations in the ledger: the tensors that autograd keeps for backward, from the moment they are saved until the last use lets go.

`torch.autograd.graph.saved_tensors_hooks` shows every tensor that autograd saves. Its memory is entered once, however many nodes save it
or a view of it, and struck off when nothing uses it any more (a finalizer on the storage). What is no activation is left out: parameters
and views of them (a whole weight and its transpose are saved by every Linear), and memory the engine has in its books already.

Inside activation checkpointing another hook stands before this one, so what is recomputed is not counted; that memory lives for one
block's backward. This costs a few microseconds a saved tensor while a recording with `activations=True` is on and nothing otherwise. This
module must never keep a tensor alive.
"""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator

import torch
from torch import nn

from .rows import Allocation, Category, Event, Lane

_entered: set[int] = set()                                  # storages on the books, by the address of the storage's own record


@contextlib.contextmanager
def watched(allocate: Callable[[Category, str, int], int], free: Callable[[int], None]) -> Iterator[None]:
    """Enter every tensor that this thread saves for backward in the block; `allocate` and `free` are the ledger's."""
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, nn.Parameter) or type(tensor) is not torch.Tensor or tensor.is_meta:
            return tensor
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in _entered and storage.nbytes():
            _entered.add(key)
            token = allocate(Category.ACTIVATION, "", storage.nbytes())

            def gone() -> None:
                _entered.discard(key)
                free(token)

            weakref.finalize(storage, gone).atexit = False
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def name_units(rows: list[Allocation], events: list[Event]) -> None:
    """Give each activation the unit that was running when it was saved: the innermost open forward, or backward, of its rank."""
    opened = sorted((e for e in events if e.lane == Lane.COMPUTE and e.phase in ("forward", "backward")), key=lambda e: (e.start, -e.end))
    starts = [event.start for event in opened]
    for row in rows:
        if row.category == Category.ACTIVATION and not row.unit:
            before = bisect_right(starts, row.start)
            row.unit = next((e.unit for e in reversed(opened[:before]) if e.end > row.start), "")
