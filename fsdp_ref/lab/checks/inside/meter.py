"""How much a rank holds: the bytes of all tensor storages that are alive, watched operation by operation.

A storage counts with what it holds now, so `untyped_storage().resize_(0)` counts as freed, and a view counts once. What was there before
the meter was started does not count unless it is told (`know`). The figures are taken in the submission's own process: one that rewrites
this module can lie about them, but not about what it sent. It must never keep a tensor alive.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_active: list[Meter] = []                                   # those that watch now
_quiet = [0]                                                # more than 0: what is made belongs to the harness
_revive = torch.UntypedStorage._new_with_weak_ptr
_nbytes = torch.UntypedStorage.nbytes


class Meter(TorchDispatchMode):
    """`with Meter() as meter:` watches. `live()` is what is alive now, `peak` the most since the last `reset`, `largest` the largest single
    storage that was made since then; all in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, torch._C.StorageBase] = {}
        self.peak = self.largest = 0
        self.made: list[int] = []                           # bytes of each storage, in the order in which they were made

    def know(self, *tensors: torch.Tensor) -> None:
        """Count these tensors too."""
        for tensor in tensors:
            self._enter(tensor)
        self.peak = max(self.peak, self.live())

    def __enter__(self):
        _active.append(self)
        return super().__enter__()

    def __exit__(self, *error):
        _active.remove(self)
        return super().__exit__(*error)

    def _enter(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        weak = storage._weak_ref()
        if weak in self._seen:
            torch.UntypedStorage._free_weak_ref(weak)
            return False
        self._seen[weak] = weak
        return True

    def live(self) -> int:
        """Bytes alive now."""
        total = 0
        for weak in list(self._seen):
            storage = _revive(weak)
            if storage is None:
                torch.UntypedStorage._free_weak_ref(weak)
                del self._seen[weak]
            else:
                total += _nbytes(storage)
        return total

    def reset(self) -> None:
        """Forget peak, largest and the list of what was made."""
        self.peak, self.largest, self.made = self.live(), 0, []

    def _watch(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result) if not _quiet[0] else ():
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and self._enter(leaf):
                size = _nbytes(leaf.untyped_storage())
                self.made.append(size)
                self.largest = max(self.largest, size)
        self.peak = max(self.peak, self.live())
        return result


@contextmanager
def quiet():
    """What is made in here does not count: it carries messages."""
    _quiet[0] += 1
    try:
        yield
    finally:
        _quiet[0] -= 1


def received(tensor: torch.Tensor) -> torch.Tensor:
    """This tensor came from elsewhere and is the learner's now: it counts."""
    for meter in _active:
        meter.made.append(_nbytes(tensor.untyped_storage()))
        meter.largest = max(meter.largest, meter.made[-1])
        meter.know(tensor)
    return tensor


# [Note: why not defined in the class] torch wraps a mode's __torch_dispatch__ when the class is made, and the wrapper imports all of
# torch._dynamo at the first operation: ten seconds of a rank's time on a busy machine, for nothing that is needed here.
Meter.__torch_dispatch__ = Meter._watch
