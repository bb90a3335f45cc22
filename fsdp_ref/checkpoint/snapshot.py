"""What one save writes, as it stands at the moment of the call: tensors, counters, tables and random state.

A save that the caller waits for looks at the tensors themselves (views, no copy). A save in the background takes copies first, so
training may go on at once: a `Staging` holds them, one copy of what this rank holds of the state, and lends the same memory to the
next such save. Everything else in a snapshot is small and always copied. Taking one draws no random number, makes no collective
and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import xxhash

from ..errors import CheckpointError
from . import random_state, safetensors_file, votes
from .jsontext import encode
from .state import LocalTensor, ModelState, OptimizerState, model_state, optimizer_state

Sections = dict[str, dict[str, LocalTensor]]


@dataclass
class Snapshot:
    """Everything that a save writes, by kind. `scheduler`, `loader` and `extra` are in the form of `jsontext.encode`.

    Attributes:
        step, keep_last: as given to `save`.
        model, optimizer: names, groups, aliases and values. The tensors to write are those of `sections`.
        sections: kind of file ("model", "optimizer") -> name in the file -> tensor.
        random: the bytes of this rank's file of random states.
    """

    step: int
    keep_last: int | None
    model: ModelState
    optimizer: OptimizerState | None
    scheduler: object
    loader: object
    extra: object
    random: bytes
    sections: Sections

    @staticmethod
    def take(step: int, keep_last: int | None, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, scheduler: object | None,
             loader: object | None, extra: object, copy: Callable[[Sections], Sections] = lambda sections: sections) -> Snapshot:
        """Look at a training run. `copy`: what to make of the tensors (`Staging.hold`), nothing by default.

        Raises:
            CheckpointError: an argument makes no sense, or something is there that cannot be saved.
        """
        if type(step) is not int or not 0 <= step < 10**18:
            raise CheckpointError(f"step is {step!r}; give a whole number from 0")
        if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
            raise CheckpointError(f"keep_last is {keep_last!r}; give 1 or more, or None to keep all")
        tensors = model_state(model)
        state = optimizer_state(optimizer, tensors) if optimizer is not None else None
        tables = [None if holder is None else encode(holder.state_dict(), f"the {name} state")
                  for name, holder in (("scheduler", scheduler), ("loader", loader))]
        sections: Sections = {"model": dict(tensors.tensors)}
        if state:
            sections["optimizer"] = {name: local for name, (_, _, local) in state.tensors.items()}
        random = random_state.capture(step, votes.rank())
        return Snapshot(step, keep_last, tensors, state, *tables, encode(extra, "extra"), random, copy(sections))

    def facts(self) -> dict[str, object]:
        """What must be the same on every rank, by the name that an error calls it."""
        shapes = {kind: {name: [local.dtype, list(local.shape)] for name, local in tensors.items()}
                  for kind, tensors in self.sections.items()}
        facts = {"the step": [self.step, self.keep_last], "the scheduler state": self.scheduler, "the loader state": self.loader,
                 "extra": self.extra, "the names, shapes and types of the model": [shapes["model"], self.model.aliases]}
        state = self.optimizer
        facts["the optimizer's groups"] = [state.kind, state.groups] if state else None
        facts["the optimizer's state"] = [shapes["optimizer"], state.values] if state else None
        return facts

    def replica_digests(self) -> dict[str, list]:
        """Name -> offsets and digest of what other ranks should hold alike."""
        result = {}
        for local in (local for tensors in self.sections.values() for local in tensors.values()):
            if local.replicas > 1:
                state = xxhash.xxh3_128()
                for piece in safetensors_file.byte_pieces(local.part):
                    state.update(piece)
                result[local.name] = [list(local.box.offsets), state.hexdigest()]
        return result


def differing(everyone: list[dict[str, list]]) -> set[str]:
    """The tensors of which two ranks hold the same box with different values. `everyone`: each rank's `replica_digests`."""
    names, first = set(), {}
    for replicas in everyone:
        for name, (offsets, digest) in replicas.items():
            if first.setdefault((name, tuple(offsets)), digest) != digest:
                names.add(name)
    return names


class Staging:
    """Memory for one copy of a rank's tensors, kept from one save to the next. Pinned where the tensors are on a CUDA device.

    One snapshot at a time: `hold` overwrites what the snapshot before was lent.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}

    def hold(self, sections: Sections) -> Sections:
        """The same sections with copies of the tensors, complete when this returns.

        A buffer serves again where shape, type and kind of device agree; what does not fit any more is freed before anything is
        allocated, so this never holds more than one copy. A CUDA tensor is copied behind the work that is queued on the current
        stream, and this waits for the copy.
        """
        wanted = {(kind, name): local.part for kind, tensors in sections.items() for name, local in tensors.items()}
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key in wanted and _fits(buffer, wanted[key])}
        with torch.no_grad():
            for key, part in wanted.items():
                if key not in self._buffers:
                    self._buffers[key] = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
                self._buffers[key].copy_(part, non_blocking=part.is_cuda)
        for device in {part.device for part in wanted.values() if part.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return {kind: {name: replace(local, part=self._buffers[kind, name]) for name, local in tensors.items()}
                for kind, tensors in sections.items()}

    @property
    def bytes(self) -> int:
        """Bytes held."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())


def _fits(buffer: torch.Tensor, part: torch.Tensor) -> bool:
    return buffer.shape == part.shape and buffer.dtype == part.dtype and buffer.is_pinned() == part.is_cuda
