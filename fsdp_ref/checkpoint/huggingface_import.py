"""A Hugging Face model straight into the shards of a model: each rank reads the byte ranges that it holds, and no full copy exists.

    1  each  reads index and headers, compares names, shapes and types          vote; up to here nothing is changed
    2  each  reads its own rows                                                 vote

The directory is not trusted (see huggingface_index). Such files carry no digests, so a changed weight cannot be noticed here.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch

from ..errors import CheckpointError
from . import layout, reading, votes
from .fit import some
from .huggingface_index import read_source
from .safetensors_file import DTYPES
from .state import LocalTensor, model_state
from .streaming import BLOCK, TensorReader, as_bytes, convert


def import_huggingface(source: str | os.PathLike, model: torch.nn.Module, *, cast: bool = False) -> dict[str, int]:
    """Load the weights of a Hugging Face model directory (or of one .safetensors file) into a model; a collective of all ranks.

    Args:
        source: a directory with `model.safetensors`, or with an index and its files. Links are refused: fetch with
            `snapshot_download(..., local_dir=...)`, which makes plain files.
        model: sharded or plain; its parameters and persistent buffers are the tensors wanted.
        cast: convert floating-point tensors to the model's type; without it another type is an error.

    Returns:
        `{"model": tensors loaded, "bytes": bytes read by this rank}`.

    Raises:
        CheckpointError: the directory is damaged or hostile, a tensor is missing, unexpected, or of another shape or type, or two names
            of one tensor have different values; the same message on every rank, and nothing has been changed.
        RankError: a rank died.
    """
    work = _Import(Path(source), model, cast)
    votes.agree(f"import {source}", work.plan)
    nbytes = votes.agree(f"finish importing {source} (what is in memory is now a mixture, import again before you train on)", work.fill)
    if work.overflowed and votes.rank() == 0:
        warnings.warn(f"the model's type cannot hold some values of {len(work.overflowed)} tensors ({some(work.overflowed)}), which are "
                      "infinite now; use torch.bfloat16 or torch.float32", stacklevel=2)
    return {"model": len(work.targets), "bytes": nbytes[votes.rank()]}


class _Import:
    """One import on one rank."""

    def __init__(self, place: Path, model: torch.nn.Module, cast: bool) -> None:
        self.place, self.model, self.cast = place, model, cast
        self.targets: dict[str, LocalTensor] = {}                        # name in the files -> this rank's part
        self.overflowed: list[str] = []

    def plan(self) -> None:
        """Stage 1."""
        self.source = read_source(self.place)
        self.reader = TensorReader(self.source.directory, self.source.entries)
        state = model_state(self.model)
        names_of = {name: [name] for name in state.tensors}
        for alias, name in state.aliases.items():
            names_of[name].append(alias)
        held = {name: [one for one in names if one in self.source.entries] for name, names in names_of.items()}
        if missing := sorted(name for name, found in held.items() if not found):
            self.explain_tie(missing, names_of)
            raise CheckpointError(f"{self.place} lacks {len(missing)} tensors of the model: {some(missing)}; import it into the model that "
                                  "it was made from")
        if unexpected := sorted(self.source.entries.keys() - {one for names in names_of.values() for one in names}):
            raise CheckpointError(f"{self.place} has {len(unexpected)} tensors that the model lacks: {some(unexpected)}; import it into "
                                  "the model that it was made from")
        for name, found in held.items():
            for one in found:
                self.check_kind(one, state.tensors[name])
            for other in found[1:]:
                self.check_equal(found[0], other)
            self.targets[found[0]] = state.tensors[name]

    def explain_tie(self, missing: list[str], names_of: dict[str, list[str]]) -> None:
        """Raise the better message when a missing tensor is noted in the files as another name of one that is there."""
        for name in missing:
            other = self.source.aliases.get(name)
            if other in self.source.entries and other not in names_of[name]:
                raise CheckpointError(f"{name} and {other} are one tensor in {self.place} and two in the model; tie them before importing")

    def check_kind(self, name: str, local: LocalTensor) -> None:
        """Shape and type of one tensor."""
        entry = self.source.entries[name]
        if entry.shape != local.shape:
            raise CheckpointError(f"{name} has the shape {list(entry.shape)} in {self.place} and {list(local.shape)} in memory; import it "
                                  "into the model that it was made from")
        theirs, mine = DTYPES[entry.dtype], DTYPES[local.dtype]
        convertible = theirs.is_floating_point and mine.is_floating_point
        if theirs != mine and not (self.cast and convertible):
            advice = "give cast=True to convert it" if convertible else "import it into the model that it was made from"
            raise CheckpointError(f"{name} has the type {entry.dtype} in {self.place} and {local.dtype} in memory; {advice}")

    def check_equal(self, first: str, second: str) -> None:
        """Two names that are one tensor in the model are stored twice: they must hold the same bytes."""
        kinds = {self.source.entries[name].dtype for name in (first, second)}
        same = len(kinds) == 1 and all(torch.equal(as_bytes(a), as_bytes(b)) for (_, a), (_, b) in
                                       zip(self.reader.blocks(first), self.reader.blocks(second), strict=True))
        if not same:
            raise CheckpointError(f"{first} and {second} are one tensor in the model and hold different values in {self.place}; untie "
                                  "them before importing")

    def fill(self) -> int:
        """Stage 2; returns the number of bytes read."""
        same = {name: local for name, local in self.targets.items() if self.source.entries[name].dtype == local.dtype}
        jobs = reading.plan({name: self.source.entries[name] for name in same}, same)
        nbytes = reading.fill(self.source.directory, jobs, self.source.headers)
        for name, local in self.targets.items():
            if name in same:
                continue
            for box in local.box.blocks(BLOCK):
                self.fill_converted(name, local, box)
            nbytes += local.box.volume * DTYPES[self.source.entries[name].dtype].itemsize
        return nbytes

    @torch.no_grad()
    def fill_converted(self, name: str, local: LocalTensor, box: layout.Box) -> None:
        """Read a block in the files' type and put it down in the model's."""
        converted, overflow = convert(self.reader.read(name, box), DTYPES[local.dtype])
        local.slice(box).copy_(converted)
        if overflow and name not in self.overflowed:
            self.overflowed.append(name)
