"""A unit: the parameters that are gathered by one all-gather, freed together, and whose gradients share one reduction.

    SHARDED --unshard()--> GATHERING --wait_unshard()--> UNSHARDED --reshard()--> SHARDED

A unit knows how to move between these states and how to reduce its gradients. It does not know *when*: schedule.py decides that.
What it does in each step follows from its `Placements` row:

    DDP              weights whole and plain, as with one shard: nothing to gather or free, gradients are all-reduced over the replicas
    ZeRO-1, ZeRO-2   weights whole at rest, the optimizer's shards are rows of them: "gather" happens after the optimizer's step only
    ZeRO-3, HSDP     weights rest as shards: gathered before use, freed after it

[Note: when the whole is stale] Under ZeRO-1 and ZeRO-2 the optimizer writes this rank's rows; those of other ranks are old until they have
been gathered. That is done right after the step. Whatever else writes to the shards (loading a state dict, an in-place operation) is
seen by their version counters, and the next forward gathers first. Writes through `.data` leave no trace; do not use them.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .. import ledger, optimizers
from ..ledger import Category
from ..mesh import UnitMesh
from ..nested import outside_transforms
from ..placements import Placement, Placements
from ..policies import MixedPrecisionPolicy, OffloadPolicy
from .gather import Gather
from .gradients import Gradients
from .memory import lay_out, piece
from .param import ShardedParam


class State(enum.Enum):
    """Where a unit's weights are (see the module docstring)."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


class Unit:
    """See the module docstring. `modules` are what the user passed to `fully_shard`; `params` the parameters they own."""

    def __init__(self, modules: Sequence[nn.Module], params: list[ShardedParam], mesh: UnitMesh, placements: Placements,
                 policy: MixedPrecisionPolicy, offload: OffloadPolicy = OffloadPolicy()) -> None:
        self.modules, self.params, self.mesh, self.placements, self.policy = modules, params, mesh, placements, policy
        self.device = mesh.device
        offloads = hasattr(offload, "pin_memory")           # a CPUOffloadPolicy, ours or torch's
        self.pin = offloads and offload.pin_memory and mesh.device.type == "cuda"
        self.home = torch.device("cpu") if offloads else mesh.device
        self.name = type(modules[0]).__name__
        self.state = State.SHARDED
        self.reshard_after_forward = self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.gradients = Gradients(self)
        self.gather: Gather | None = None
        self.keep_mesh: UnitMesh | None = None              # reshard_after_forward=<int>: the smaller group that keeps the weights
        self.kept: torch.Tensor | None = None               # this rank's part of them, bytes
        self.forward_indices: list[int] = []                # where this unit stands in the order of forwards (see schedule.py)
        self.gather_stream: torch.cuda.Stream | None = None
        self.reduce_stream: torch.cuda.Stream | None = None
        self.loose: dict[int, list[torch.Tensor]] = {}      # memory of whole parameters that extensions make (gather.py)
        self._books: dict[str, int] = {}                    # tokens of the ledger
        self._shard_token, self._versions = 0, None
        weakref.finalize(self, ledger.close_books, self._books)
        self.pack()
        if self.sharded and self.resident:
            optimizers.refresh_after_step(self)

    @property
    def sharded(self) -> bool:
        """True when the optimizer sees shards (False: DDP, whose parameters are whole and never gathered)."""
        return self.placements.optimizer is Placement.SHARD

    @property
    def resident(self) -> bool:
        """True when whole weights rest (DDP, ZeRO-1, ZeRO-2)."""
        return self.placements.parameter is Placement.REPLICATE

    # -- at rest --------------------------------------------------------------------------------------------------------------

    def pack(self) -> None:
        """Lay this rank's padded shards behind one another in one flat piece of memory, so that the gather needs no copy in.

        With whole weights at rest the shards are rows of those instead, if the dtypes agree: no byte is held twice. Called again when
        something gave the shards other memory or another dtype.
        """
        plain = [param.plain for param in self.params]
        self.row_offsets, total = lay_out([(p.numel * is_plain, p.dtype) for p, is_plain in zip(self.params, plain, strict=True)])
        casts = any(self.compute_dtype(p) != p.dtype for p in self.params)
        home = self.params[0].local.device if self.params else self.home
        home = home if home.type == "meta" else self.home
        self.whole, fresh = None, not any(isinstance(p.sharded, DTensor) for p in self.params)
        self.aliased = self.sharded and self.resident and not casts and all(plain) and home == self.home
        if self.aliased:
            self.allocate_whole()
            if fresh:
                with torch.no_grad():
                    for param in self.params:
                        param.full.copy_(param.sharded)
        self.flat = torch.empty(total if self.sharded and not self.aliased else 0, dtype=torch.uint8, device=home,
                                pin_memory=self.pin and home.type == "cpu")
        for index, param in enumerate(self.params):
            if self.aliased:
                param.place_shard(self.whole_of(index).view(self.mesh.size, param.numel)[self.mesh.rank].view(torch.uint8))
            else:
                start = self.row_offsets[index]
                param.place_shard(self.flat[start : start + param.numel * param.dtype.itemsize] if plain[index] else None)
        self.flat_is_ready = not casts and not self.aliased and all(plain) and home == self.device
        self._versions = self._shard_versions() if self.aliased and fresh else None
        self.enter_books()

    def repack_if_moved(self) -> None:
        """Pack again if any shard is no longer where it was put (`module.to`, `to_empty`, an assigned state dict)."""
        adopted = [param.adopt() for param in self.params]
        moved = [p.local.dtype != p.dtype or p.local.device != p.padded.device or
                 (p.local.numel() and type(p.local) is torch.Tensor and p.local.data_ptr() != p.padded.data_ptr()) for p in self.params]
        waiting = [param.local.is_meta for param in self.params]
        if any(waiting) and not all(waiting):
            return                                          # a state dict is being assigned, module by module; the first forward asks again
        if any(adopted) or any(moved):
            for param in self.params:
                param.dtype, param.full = param.local.dtype, None
            self.pack()

    def enter_books(self) -> None:
        """Write the resting weights, and who holds which rows, into the ledger's books (again when names become known)."""
        ledger.release_shards(self._shard_token)
        self._strike("rest")
        nbytes = 0 if self.aliased else sum(p.padded.numel() * p.padded.element_size() for p in self.params)
        rows = [ledger.Shard(ledger.rank(), self.name, p.name, tuple(p.shape), str(p.dtype).removeprefix("torch."),
                             p.first, p.rows, p.chunk, p.dim) for p in self.params]
        self._shard_token = self._books["shards"] = ledger.hold_shards(rows)
        self._enter("rest", Category.SHARDED_PARAM if self.sharded else Category.UNSHARDED_PARAM, nbytes, self.flat)

    def describe(self) -> list[str]:
        """One line for the unit and one a parameter, to be compared with those of the other ranks."""
        policy = f"computed in {self.policy.param_dtype} and reduced in {self.policy.reduce_dtype}"
        return [f"unit {self.name} ({self.placements.name}, {len(self.params)} parameters, {policy})",
                *(f"{p.name} of shape {tuple(p.shape)} and {p.dtype} cut along dim {p.dim} and "
                  f"{'trained' if p.requires_grad else 'frozen'} in unit {self.name}" for p in self.params)]

    def starts(self) -> dict[str, str]:
        """Digests of the weights that were sharded, where nobody has written others since (a checkpoint, say)."""
        return {p.name: p.start for p in self.params if p.start and p.start_version == p.version}

    # -- gather, compute, free ------------------------------------------------------------------------------------------------

    @outside_transforms
    def unshard(self, phase: str = "forward") -> None:
        """Start gathering the weights. Nothing happens if they are there or on their way."""
        if self.state is not State.SHARDED or not self.params:
            return
        self.start_gather(phase)
        self.state = State.GATHERING

    @outside_transforms
    def wait_unshard(self) -> None:
        """Finish the gather and let the modules hold the whole weights."""
        if self.state is not State.GATHERING:
            return
        self.finish_gather()
        for param in self.params:
            if param.full.requires_grad != param.requires_grad:
                param.full.requires_grad_(param.requires_grad)                      # frozen or thawed since the last time
            param.register(param.full)
        self.state = State.UNSHARDED

    def start_gather(self, phase: str) -> None:
        """Put a gather on its way, if the whole weights are not there. [Note: when the whole is stale]"""
        if self.gather is None and self.sharded and not (self.resident and self._versions == self._shard_versions()):
            if self.gather_stream is not None and (self.resident or self.kept is not None):
                self.gather_stream.wait_stream(torch.cuda.current_stream())         # it reads what was written there in this step
            self.gather = Gather(self, phase)

    def finish_gather(self) -> None:
        """Have the whole weights filled by the gather that is on its way, if there is one."""
        if self.gather is not None:
            self.gather.finish()
            self.gather = self.kept = None
            self._strike("kept")
            memory = {id(tensor): tensor for tensors in self.loose.values() for tensor in tensors}.values()
            self._enter("loose", Category.UNSHARDED_PARAM, sum(tensor.untyped_storage().size() for tensor in memory), *memory)
            self._versions = self._shard_versions() if self.resident else None

    @outside_transforms
    def reshard(self) -> None:
        """Free the whole weights; the modules hold the shards again. A gather on its way is waited for first."""
        self.kept = None
        self._strike("kept")
        if self.state is State.SHARDED:
            return
        self.wait_unshard()
        for param in self.params:
            param.register(param.sharded)
        if not self.resident:
            self._free_whole()
        self.state = State.SHARDED

    def end_forward(self) -> None:
        """Forward is over: free the weights, keep a part of them, or leave them, as the user said."""
        if self.keep_mesh is not None and self.params:
            self.keep_part()
        elif self.reshard_after_forward:
            self.reshard()

    def keep_part(self) -> None:
        """Free the weights but for 1/k of them on each of k neighbours: backward then gathers from near by, for P/k bytes meanwhile."""
        ranks, rank = self.keep_mesh.size, self.keep_mesh.rank
        wholes = [self.whole_of(index) for index in range(len(self.params))]
        self.kept_offsets, total = lay_out([(whole.numel() // ranks, whole.dtype) for whole in wholes])
        kept = torch.empty(total, dtype=torch.uint8, device=self.device)
        for whole, start in zip(wholes, self.kept_offsets, strict=True):
            numel = whole.numel() // ranks
            piece(kept, start, numel, whole.dtype).copy_(whole[rank * numel : (rank + 1) * numel])
        self.reshard()
        self.kept = kept
        self._enter("kept", Category.UNSHARDED_PARAM, total, kept)

    def compute_dtype(self, param: ShardedParam) -> torch.dtype:
        """The dtype a parameter is gathered in and computes with."""
        dtype = self.policy.param_dtype
        return dtype if dtype is not None and param.dtype.is_floating_point else param.dtype

    def whole_of(self, index: int) -> torch.Tensor:
        """Memory of the whole parameter `index`, in its compute dtype: 1-D, padded."""
        param = self.params[index]
        return piece(self.whole, self._whole_offsets[index], param.numel * self.mesh.size, self.compute_dtype(param))

    def allocate_whole(self) -> None:
        """Give the whole parameters their memory (again). Everything autograd saved keeps pointing at this storage."""
        if self.whole is None:
            self._make_whole()
        self._resize(self._whole_bytes)

    def _make_whole(self) -> None:
        """Create the memory of the whole parameters and the Parameters over it, once. [Note: the whole parameter is made once]

        The first forward may run in inference mode; what is made there could never be trained.
        """
        plain = [not hasattr(param.local, "fsdp_pre_all_gather") for param in self.params]
        sizes = [(param.numel * self.mesh.size * is_plain, self.compute_dtype(param))
                 for param, is_plain in zip(self.params, plain, strict=True)]
        self._whole_offsets, self._whole_bytes = lay_out(sizes, align=64)          # as torch's allocator does: kernels like it
        with torch.inference_mode(False):
            self.whole = torch.empty(self._whole_bytes, dtype=torch.uint8, device=self.device)
            for index, param in enumerate(self.params):
                if plain[index]:
                    param.make_full(self.whole_of(index))

    def _free_whole(self) -> None:
        self._resize(0)
        for tensor in (tensor for tensors in self.loose.values() for tensor in tensors):
            tensor.untyped_storage().resize_(0)
        self._strike("loose")

    def _resize(self, nbytes: int) -> None:
        storage = self.whole.untyped_storage()
        if storage.size() != nbytes or "whole" not in self._books:
            storage.resize_(nbytes)
            self._enter("whole", Category.UNSHARDED_PARAM, nbytes, self.whole)

    def _shard_versions(self) -> list[tuple[int, int]]:
        return [param.version for param in self.params]

    # -- books ----------------------------------------------------------------------------------------------------------------

    def _enter(self, what: str, category: Category, nbytes: int, *memory: torch.Tensor) -> None:
        self._strike(what)
        if nbytes:
            self._books[what] = ledger.allocate(category, self.name, nbytes, memory)

    def _strike(self, what: str) -> None:
        ledger.free(self._books.pop(what, 0))

    def __repr__(self) -> str:
        return f"Unit({self.name}: {len(self.params)} parameters, {self.state.value}, {self.placements.name} on {self.mesh.ranks} ranks)"
