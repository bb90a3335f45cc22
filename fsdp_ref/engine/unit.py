"""A unit: the parameters that are gathered by one all-gather, freed together, and whose gradients share one reduction.

    SHARDED --unshard()--> GATHERING --wait_unshard()--> UNSHARDED --reshard()--> SHARDED

A unit knows how to move between these states and how to reduce its gradients. It does not know *when*: schedule.py decides that.
What it does in each step follows from its `Placements` row; under DDP the weights rest whole, so there is nothing to gather or free.

Two ranks, a unit with a = [a0 a1] and b = [b0 b1 b2] (rows; p is padding):

    at rest            rank 0: flat shard  a0 b0 b1             rank 1: flat shard  a1 b2 p
    all-gather         both:   buffer      a0 b0 b1 | a1 b2 p
    copy out           both:   a0 a1   and   b0 b1 b2 p         (buffer freed)
    compute
    gradients          rank 0: a0 a1, b0 b1 b2                  rank 1: the same rows, other numbers
    copy in            both:   buffer      a0 b0 b1 | a1 b2 0   (gradients freed)
    reduce-scatter     rank 0: a0 b0 b1                         rank 1: a1 b2 0       each the mean over both ranks
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import collectives, ledger
from ..collectives import Label, Pending
from ..ledger import Category
from ..placements import Placement, Placements
from .memory import lay_out, piece
from .param import ShardedParam
from .policies import MixedPrecisionPolicy
from .reduction import Reduction


class State(enum.Enum):
    """Where a unit's weights are (see the module docstring)."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


class Unit:
    """See the module docstring. `modules` are what the user passed to `fully_shard`; `params` the parameters they own."""

    def __init__(self, modules: Sequence[nn.Module], params: list[ShardedParam], mesh: DeviceMesh, placements: Placements,
                 policy: MixedPrecisionPolicy, device: torch.device, reshard_after_forward: bool) -> None:
        self.modules, self.params, self.mesh, self.placements, self.policy = modules, params, mesh, placements, policy
        self.device = device
        self.group, self.world_size, self.rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        self.name = type(modules[0]).__name__
        self.state = State.SHARDED
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.sync_gradients = True
        self.divide_factor: float | None = None
        self.reduction: Reduction | None = None
        self.forward_indices: list[int] = []                # where this unit stands in the order of forwards (see schedule.py)
        self.gather_stream: torch.cuda.Stream | None = None
        self.reduce_stream: torch.cuda.Stream | None = None
        self._pending: Pending | None = None
        self._gathered: torch.Tensor | None = None          # the all-gather's output, rank-major, bytes
        self._whole: torch.Tensor | None = None             # memory of all whole parameters, bytes
        self._books: dict[str, int] = {}                    # tokens of the ledger
        self._shard_token = 0
        weakref.finalize(self, _close_books, self._books)
        if self.sharded:
            self.pack()

    @property
    def sharded(self) -> bool:
        """True when the weights rest as shards (False: DDP, nothing to gather)."""
        return self.placements.parameter is Placement.SHARD

    # -- at rest --------------------------------------------------------------------------------------------------------------

    def pack(self) -> None:
        """Lay this rank's padded shards behind one another in one flat piece of memory, so that the gather needs no copy in.

        Called again when something gave the shards other memory or another dtype.
        """
        self._shard_offsets, total = lay_out([(p.numel, p.dtype) for p in self.params])
        home = self.params[0].local.device if self.params else self.device
        self._flat = torch.empty(total, dtype=torch.uint8, device=home)
        for param, offset in zip(self.params, self._shard_offsets, strict=True):
            param.place_shard(self._flat[offset : offset + param.numel * param.dtype.itemsize])
        self._gather_dtypes = [self._compute_dtype(p) for p in self.params]
        self._casts = self._gather_dtypes != [p.dtype for p in self.params]
        self._offsets, self._row_bytes = lay_out([(p.numel, d) for p, d in zip(self.params, self._gather_dtypes, strict=True)])
        self._whole = None
        self.enter_books()

    def repack_if_moved(self) -> None:
        """Pack again if any shard is no longer part of the flat memory (`module.to`, `to_empty`, an assigned state dict)."""
        adopted = [param.adopt() for param in self.params]
        if not self.sharded:
            if any(adopted) or any(p.full.dtype != p.dtype or p.full.device != p.device for p in self.params):
                for param in self.params:
                    param.dtype, param.device = param.full.dtype, param.full.device
                self.enter_books()
            return
        at = self._flat.data_ptr()
        moved = [p.local.dtype != p.dtype or p.local.device != self._flat.device or (p.local.numel() and p.local.data_ptr() != at + offset)
                 for p, offset in zip(self.params, self._shard_offsets, strict=True)]
        if any(adopted) or any(moved):
            for param in self.params:
                param.dtype = param.local.dtype
            self.pack()

    def enter_books(self) -> None:
        """Write the resting weights, and who holds which rows, into the ledger's books (again when names become known)."""
        ledger.release_shards(self._shard_token)
        self._strike("rest")
        if self.sharded:
            category, nbytes = Category.SHARDED_PARAM, self._flat.numel()
        else:
            category, nbytes = Category.UNSHARDED_PARAM, sum(p.full.numel() * p.full.element_size() for p in self.params)
        rows = [ledger.Shard(ledger.rank(), self.name, p.name, tuple(p.shape), str(p.dtype).removeprefix("torch."),
                             p.first, p.rows, p.chunk) for p in self.params]
        self._shard_token = self._books["shards"] = ledger.hold_shards(rows)
        self._enter("rest", category, nbytes)

    # -- gather, compute, free ------------------------------------------------------------------------------------------------

    def unshard(self, phase: str = "forward") -> None:
        """Start gathering the weights. Nothing happens if they are there or on their way."""
        if not self.sharded or self.state is not State.SHARDED or not self.params:
            return
        self.state = State.GATHERING
        if self.world_size == 1:
            return                                                                 # no collective: the shard is the whole
        with _on_stream(self.gather_stream):
            shard = self._gather_input()                                           # (row_bytes,)
            self._gathered = torch.empty(self.world_size * self._row_bytes, dtype=torch.uint8, device=self.device)
        self._enter("gather", Category.ALL_GATHER, self._gathered.numel())
        self._pending = collectives.all_gather(self._gathered, shard, self.group, Label(self.name, phase), self.gather_stream)

    def wait_unshard(self) -> None:
        """Finish the gather: lay the rows of every parameter together, give the buffer back, let the modules hold the whole."""
        if self.state is not State.GATHERING:
            return
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        self._copy_out(self._gathered if self.world_size > 1 else self._gather_input())
        if self.gather_stream is not None:
            self.gather_stream.wait_stream(torch.cuda.current_stream())             # the buffer's memory belongs to that stream
        self._gathered = None
        self._strike("gather")
        for param in self.params:
            if param.full.requires_grad != param.requires_grad:
                param.full.requires_grad_(param.requires_grad)                      # frozen or thawed since the last time
            param.register(param.full)
        self.state = State.UNSHARDED

    def reshard(self) -> None:
        """Free the whole weights; the modules hold the shards again. A gather on its way is waited for first."""
        if not self.sharded or not self.params or self.state is State.SHARDED:
            return
        if self.state is State.GATHERING:
            self.wait_unshard()
        for param in self.params:
            param.register(param.sharded)
        self._resize(0)
        self.state = State.SHARDED

    def _gather_input(self) -> torch.Tensor:
        """This rank's padded shards in the dtype they are gathered in: the flat shard itself, or a cast copy of it."""
        if not self._casts and self._flat.device == self.device:
            return self._flat
        cast = torch.empty(self._row_bytes, dtype=torch.uint8, device=self.device)
        for param, at, offset, dtype in zip(self.params, self._shard_offsets, self._offsets, self._gather_dtypes, strict=True):
            piece(cast, offset, param.numel, dtype).copy_(piece(self._flat, at, param.numel, param.dtype))
        return cast

    def _copy_out(self, gathered: torch.Tensor) -> None:
        """(world, row_bytes) rank-major -> each parameter contiguous: rows of rank 0, rows of rank 1, ..., padding last.

        [Note: the version counter] Autograd counts in-place writes to what it saved and refuses to run backward over changed tensors.
        A gather writes the very numbers that were there, so the counter is kept (all whole parameters share one: they share memory).
        """
        if self._whole is None:
            self._make_whole()
        self._resize(self._whole_bytes)
        rows = gathered.view(self.world_size, self._row_bytes)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(self._whole):
            for param, offset, start, dtype in zip(self.params, self._offsets, self._whole_offsets, self._gather_dtypes, strict=True):
                nbytes = param.numel * dtype.itemsize
                self._whole[start : start + nbytes * self.world_size].view(self.world_size, nbytes).copy_(rows[:, offset : offset + nbytes])

    def _make_whole(self) -> None:
        """Create the memory of the whole parameters and the Parameters over it, once. [Note: the whole parameter is made once]

        The first forward may run in inference mode; what is made there could never be trained.
        """
        sizes = [(param.numel * self.world_size, dtype) for param, dtype in zip(self.params, self._gather_dtypes, strict=True)]
        self._whole_offsets, self._whole_bytes = lay_out(sizes, align=64)          # as torch's allocator does: kernels like it
        with torch.inference_mode(False):
            self._whole = torch.empty(self._whole_bytes, dtype=torch.uint8, device=self.device)
            for param, offset, (numel, dtype) in zip(self.params, self._whole_offsets, sizes, strict=True):
                param.make_full(piece(self._whole, offset, numel, dtype))

    def _resize(self, nbytes: int) -> None:
        """Give the whole parameters their memory, or take it away. Everything autograd saved keeps pointing at this storage."""
        storage = self._whole.untyped_storage()
        if storage.size() != nbytes:
            storage.resize_(nbytes)
        self._enter("whole", Category.UNSHARDED_PARAM, nbytes)

    def _compute_dtype(self, param: ShardedParam) -> torch.dtype:
        dtype = self.policy.param_dtype
        return dtype if dtype is not None and param.dtype.is_floating_point else param.dtype

    # -- gradients ------------------------------------------------------------------------------------------------------------

    def expect_gradients(self) -> None:
        """Backward of this unit begins: from now on whole gradients come into being."""
        if not self.sharded and self.sync_gradients:
            for param in self.params:
                param.set_aside()
        if "grad" not in self._books and all(p.full is None or p.full.grad is None for p in self.params):
            nbytes = sum(p.full.numel() * p.full.element_size() for p in self.params if p.full is not None and p.full.requires_grad)
            self._enter("grad", Category.UNSHARDED_GRAD, nbytes)

    def start_reduction(self) -> bool:
        """Reduce the gradients that backward left on the whole parameters; False if there are none. They are freed at once."""
        pairs = [(p, p.take_gradient()) for p in self.params if p.full is not None and (p.full.grad is not None or p.kept is not None)]
        self.finish_reduction()
        if not pairs:
            self._strike("grad")
            return False
        self.reduction = Reduction(self, pairs)
        self._strike("grad")
        return True

    def keep_gradients(self) -> None:
        """A backward without sync is over: accumulate in the dtype of the reduction (torch's rule)."""
        for param in self.params:
            param.unreduced = param.full is not None and param.full.grad is not None
            if param.full is not None and self.policy.reduce_dtype is not None:
                param.keep_gradient(self.policy.reduce_dtype)

    def restore_gradients(self) -> None:
        """DDP, at the end of backward: what was reduced, now and before, becomes `.grad`."""
        for param in self.params:
            param.restore()

    def finish_reduction(self) -> None:
        """Wait for the reduction and put its result where the optimizer looks for it."""
        if self.reduction is not None:
            reduction, self.reduction = self.reduction, None
            reduction.finish()

    def drop_gradients(self) -> None:
        """Forget the whole gradients of a step that was cut short, and a reduction of them that is on its way."""
        if self.reduction is not None:
            reduction, self.reduction = self.reduction, None
            reduction.drop()
        for param in self.params:
            if param.full is not None:
                param.full.grad = param.kept = param.reduced = None
                param.unreduced = False
        self._strike("grad")

    # -- books ----------------------------------------------------------------------------------------------------------------

    def _enter(self, what: str, category: Category, nbytes: int) -> None:
        self._strike(what)
        if nbytes:
            self._books[what] = ledger.allocate(category, self.name, nbytes)

    def _strike(self, what: str) -> None:
        ledger.free(self._books.pop(what, 0))

    def __repr__(self) -> str:
        return f"Unit({self.name}: {len(self.params)} parameters, {self.state.value}, {self.placements.name} on {self.world_size} ranks)"


def _close_books(books: dict[str, int]) -> None:
    """A unit is gone: strike all it held."""
    for token in books.values():
        ledger.free(token)
        ledger.release_shards(token)


def _on_stream(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
