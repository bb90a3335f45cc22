"""Memory in the ledger that the engine does not hold itself: activations, and what lives inside one operation or between two.

`torch.autograd.graph.saved_tensors_hooks` shows every tensor that autograd saves. Its memory is entered once, however many nodes save it
or a view of it, and struck off when nothing uses it any more (a finalizer on the storage). What is no activation is left out: parameters
and views of them (a whole weight and its transpose are saved by every Linear), and memory the engine has in its books already.

With `temporaries` a dispatch mode sees every operation's results as well. New memory among them is temporary until somebody claims it: the
engine for its buffers and gradients, the optimizer for its state, the hooks above for what autograd saves. The row that is entered then
begins where the temporary one did, and that one is dropped, so no byte counts twice. (torch's MemTracker divides memory the same way.)

[Note: what is recomputed] Inside activation checkpointing another hook stands before these, so `activations` alone does not see what is
recomputed. The mode does: gradients are recorded while a backward runs, which happens there and nowhere else (and under create_graph).

Costs a few microseconds a saved tensor, and ten or so an operation with `temporaries`, while such a recording is on; nothing otherwise.
This module must never keep a tensor alive.
"""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .rows import Allocation, Category, Event, Lane


class Memory:
    """What this module has on the books. One for a process: memory may outlive the recording in which it was entered.

    `allocate`, `free`, `withdraw` and `row_of` are the ledger's.
    """

    def __init__(self, allocate: Callable[..., int], free: Callable[[int], None], withdraw: Callable[[int], float | None],
                 row_of: Callable[[int], Allocation | None]) -> None:
        self._allocate, self._free, self._withdraw, self._row_of = allocate, free, withdraw, row_of
        self._entered: dict[int, int] = {}                  # address of a storage's own record -> token
        self.sees_results = False

    @contextlib.contextmanager
    def watched(self, temporaries: bool) -> Iterator[None]:
        """Enter every tensor that this thread saves for backward in the block, and with `temporaries` all that operations make."""
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            base = tensor if tensor._base is None else tensor._base
            if not isinstance(base, nn.Parameter) and type(tensor) is torch.Tensor and not tensor.is_meta:
                self.enter(tensor.untyped_storage(), Category.ACTIVATION)
            return tensor

        self.sees_results = temporaries
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                with Results(self.enter) if temporaries else contextlib.nullcontext():
                    yield
        finally:
            self.sees_results = False

    def claim(self, tensors: Iterable[torch.Tensor]) -> float | None:
        """Their owner is about to enter these tensors: their rows here are dropped. Returns when the first of them was made, if known."""
        tokens = [self._entered.pop(storage._cdata, 0) for tensor in tensors for storage in _storages(tensor)]
        return min((made for token in tokens if (made := self._withdraw(token)) is not None), default=None)

    def own(self, tensors: Iterable[torch.Tensor], category: Category, unit: str) -> None:
        """What these tensors are, from their beginning to their end."""
        for storage in (storage for tensor in tensors for storage in _storages(tensor)):
            row = self._row_of(self._entered.get(storage._cdata, 0))
            if row is not None:
                row.category, row.unit = category, unit

    def enter(self, storage: torch.UntypedStorage, category: Category) -> None:
        """Once a storage; what was temporary becomes an activation, from its beginning, and never the other way."""
        key, nbytes = storage._cdata, storage.nbytes()
        there = self._entered.get(key, 0)
        row = self._row_of(there)
        if not nbytes or (row is not None and (row.category != Category.TEMPORARY or category is Category.TEMPORARY)):
            return
        made = self._withdraw(there)
        token = self._entered[key] = self._allocate(category, "", nbytes, since=made)

        def gone() -> None:
            if self._entered.get(key) == token:
                del self._entered[key]
            self._free(token)

        weakref.finalize(storage, gone).atexit = False


class Results(TorchDispatchMode):
    """While it is on, new memory in an operation's results is entered: as temporary, or as an activation. [Note: what is recomputed]"""

    def __init__(self, enter: Callable[[torch.UntypedStorage, Category], None]) -> None:
        super().__init__()
        self.enter = enter

    def look(self, func, types, args=(), kwargs=None):
        """Run the operation and enter what is new in its results: memory that none of its arguments has."""
        results = func(*args, **(kwargs or {}))
        made = {storage._cdata: storage for result in tree_leaves(results) for storage in _storages(result)}
        if made:
            for given in tree_leaves((args, kwargs)):
                for storage in _storages(given):
                    made.pop(storage._cdata, None)
        for storage in made.values():
            recomputed = torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()
            self.enter(storage, Category.ACTIVATION if recomputed else Category.TEMPORARY)
        return results


# torch wraps a mode's __torch_dispatch__ when the class is made, and that wrapper imports all of torch._dynamo at the first operation.
Results.__torch_dispatch__ = Results.look


def _storages(value: object) -> Iterator[torch.UntypedStorage]:
    """The memory of a tensor, or of the tensors it is made of (a DTensor's shard); none of what has none here."""
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return
    if hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from _storages(getattr(value, name))
    elif value.layout is torch.strided:
        yield value.untyped_storage()


def name_units(rows: list[Allocation], events: list[Event]) -> None:
    """Give each row of this module the unit that was running when it began: the innermost open forward, backward or optimizer step."""
    opened = sorted((e for e in events if (e.lane == Lane.COMPUTE and e.phase in ("forward", "backward")) or e.lane == Lane.OPTIMIZER),
                    key=lambda e: (e.start, -e.end))
    starts = [event.start for event in opened]
    for row in rows:
        if row.category in (Category.ACTIVATION, Category.TEMPORARY) and not row.unit:
            before = bisect_right(starts, row.start)
            row.unit = next((e.unit for e in reversed(opened[:before]) if e.end > row.start), "")
