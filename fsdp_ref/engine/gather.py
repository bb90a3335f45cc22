"""One all-gather of one unit: this rank's pieces of every parameter into one buffer, over the wire, and out into the whole parameters.

Two ranks, a = [a0 a1] and b = [b0 b1 b2] (rows; p is padding):

    pieces             rank 0: a0 | b0 b1                       rank 1: a1 | b2 p
    all-gather         both:   buffer  a0 b0 b1 | a1 b2 p       rank-major: one row of the buffer a rank
    copy out           both:   a0 a1   and   b0 b1 b2 p         (buffer freed)

A parameter usually has one piece, its padded shard in the dtype it is gathered in. A local tensor with the methods `fsdp_pre_all_gather`
and `fsdp_post_all_gather` says itself what goes over the wire and what is made of it (quantised bytes and their scale, say); torch's
protocol, see `FSDPParam.all_gather_inputs` and `init_unsharded_param` of torch/distributed/fsdp/_fully_shard/_fsdp_param.py.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from typing import TYPE_CHECKING

import torch

from .. import collectives, ledger
from ..collectives import Label
from ..ledger import Category
from .memory import lay_out, piece
from .param import ShardedParam

if TYPE_CHECKING:
    from .unit import Unit


class Gather:
    """An all-gather on its way. Make one to start it, `finish` it to have the whole parameters filled."""

    def __init__(self, unit: Unit, phase: str) -> None:
        self.unit, self.kept = unit, unit.kept is not None
        mesh = unit.keep_mesh if self.kept else unit.mesh
        self.size = mesh.size
        with torch.cuda.stream(unit.gather_stream) if unit.gather_stream is not None else contextlib.nullcontext():
            own = self._pieces()                                                    # (row_bytes,)
            self.buffer = own if self.size == 1 else torch.empty(self.size * own.numel(), dtype=torch.uint8, device=unit.device)
        self.pending, self.token = None, 0
        if self.size > 1:                                                           # alone: no collective, the shard is the whole
            self.token = ledger.allocate(Category.ALL_GATHER, unit.name, self.buffer.numel(), (self.buffer,))
            weakref.finalize(self, ledger.free, self.token)
            self.pending = collectives.all_gather(self.buffer, own, mesh.group, Label(unit.name, phase), unit.gather_stream)

    def _pieces(self) -> torch.Tensor:
        """What this rank sends, in one row of bytes; `self.offsets[i]` says where the pieces of parameter i begin in it."""
        unit = self.unit
        self.extended: dict[int, Extended] = {}
        if self.kept:
            self.offsets = [[offset] for offset in unit.kept_offsets]
            return unit.kept
        for index, param in enumerate(unit.params):
            if hasattr(param.local, "fsdp_pre_all_gather"):
                self.extended[index] = Extended(param, unit)
        if unit.flat_is_ready and not self.extended:
            self.offsets = [[offset] for offset in unit.row_offsets]
            return unit.flat
        parts: list[tuple[int, torch.Tensor, torch.dtype]] = []                     # parameter, piece (1-D), its dtype on the wire
        for index, param in enumerate(unit.params):
            if index in self.extended:
                parts += [(index, tensor, tensor.dtype) for tensor in self.extended[index].inputs]
            else:
                parts.append((index, param.padded.view(-1), unit.compute_dtype(param)))
        starts, total = lay_out([(tensor.numel(), dtype) for _, tensor, dtype in parts])
        row = torch.empty(total, dtype=torch.uint8, device=unit.device)
        self.offsets = [[] for _ in unit.params]
        for start, (index, tensor, dtype) in zip(starts, parts, strict=True):
            piece(row, start, tensor.numel(), dtype).copy_(tensor, non_blocking=True)
            self.offsets[index].append(start)
        return row

    def finish(self) -> None:
        """Wait, lay the rows of every parameter together, give the buffer back.

        [Note: the version counter] Autograd counts in-place writes to what it saved and refuses to run backward over changed tensors.
        A gather writes the very numbers that were there, so the counter is kept (all whole parameters share one: they share memory).
        """
        unit = self.unit
        if self.pending is not None:
            self.pending.wait()
        unit.allocate_whole()
        rows = self.buffer.view(self.size, -1)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(
                (unit.whole, *(tensor for tensors in unit.loose.values() for tensor in tensors))):
            for index, param in enumerate(unit.params):
                if index in self.extended:
                    self.extended[index].finish(rows, self.offsets[index])
                    continue
                whole, (start,) = unit.whole_of(index), self.offsets[index]         # (padded whole,) in the gathered dtype
                nbytes = whole.numel() * whole.element_size() // self.size
                source = rows[:, start : start + nbytes]
                if param.dim == 0 or self.kept:                                     # side by side; what was kept is cut that way too
                    whole.view(torch.uint8).view(self.size, nbytes).copy_(source)
                else:
                    param.by_rank(whole).copy_(source.view(whole.dtype).view(self.size, *param.chunk_shape))
        if unit.gather_stream is not None:
            unit.gather_stream.wait_stream(torch.cuda.current_stream())             # the buffer's memory belongs to that stream
        self.buffer = self.pending = None
        ledger.free(self.token)


class Extended:
    """One parameter whose local tensor says what goes over the wire."""

    def __init__(self, param: ShardedParam, unit: Unit) -> None:
        self.param, self.unit = param, unit
        local = param.local.to(unit.device) if param.local.device != unit.device else param.local
        if not hasattr(local, "fsdp_post_all_gather"):
            raise AssertionError("Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined "
                                 f"if using all-gather extensions: {param.name}")
        arguments = (param.mesh.shard_mesh, param.shape, param.stride, param.slots[0][0], unit.policy)
        wanted = len(inspect.signature(local.fsdp_pre_all_gather).parameters)
        if wanted not in (1, 5):
            raise AssertionError(f"Invalid fsdp_pre_all_gather of {param.name}: it takes {wanted} arguments and should take (mesh, "
                                 "outer_size, outer_stride, module, mp_policy)")
        inputs, self.metadata = local.fsdp_pre_all_gather(*arguments[:wanted])
        self.shapes = [t.shape for t in inputs]
        if wanted == 5 and local.shape != param.chunk_shape and any(shape != param.chunk_shape for shape in self.shapes):
            raise AssertionError(f"When a parameter is unevenly sharded by FSDP (orig size={param.shape}, FSDP world size="
                                 f"{param.mesh.size}), fsdp_pre_all_gather must return all-gather inputs with the padded sharded size "
                                 f"{param.chunk_shape} but got {self.shapes}")
        self.inputs = [t.reshape(-1) for t in inputs]

    def finish(self, rows: torch.Tensor, starts: list[int]) -> None:
        """Make the whole parameter of what arrived. Its memory comes and goes like that of any other (`Unit.loose`)."""
        loose, outputs, param = self.unit.loose.setdefault(id(self.param), []), [], self.param
        for index, (start, shape, own) in enumerate(zip(starts, self.shapes, self.inputs, strict=True)):
            nbytes, size = own.numel() * own.element_size(), rows.shape[0]
            if index == len(loose):
                loose.append(torch.empty(size * own.numel(), dtype=own.dtype, device=rows.device))
            loose[index].untyped_storage().resize_(size * nbytes)
            loose[index].view(torch.uint8).view(size, nbytes).copy_(rows[:, start : start + nbytes])
            outputs.append(loose[index].view(-1, *shape[1:]))
        dtype = self.unit.compute_dtype(param)
        for inner in loose[len(outputs):]:
            inner.untyped_storage().resize_(inner.numel() * inner.element_size())
        if param.full is not None:
            param.local.fsdp_post_all_gather(tuple(outputs), self.metadata, dtype, out=param.full)
            return
        whole, inner = param.local.fsdp_post_all_gather(tuple(outputs), self.metadata, dtype)
        loose.extend(inner)
        param.make_full(whole)
