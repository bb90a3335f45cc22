"""Save a checkpoint: every rank writes its part into a temporary directory, all vote, and one rename makes it real.

    1  all     look at the state; rank 0 makes step-00000120.tmp-<unique>/               vote
    2  each    writes and flushes its model, optimizer and random-state file             vote: bytes and digests
    3  rank 0  checks the votes, writes and flushes the manifest and the directory,
               renames it to step-00000120/, flushes the parent, replaces `latest`       vote
    4  rank 0  deletes old checkpoints

A process killed anywhere in this leaves the old checkpoints as they were, and the new one either whole or under its temporary
name. A committed directory is never written into. Saving draws no random number and changes nothing in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
import warnings
from pathlib import Path

import torch
import xxhash

from .. import collectives, ledger
from ..errors import CheckpointError, RankError
from ..ledger import Lane
from . import files, layout, random_state, retention, safetensors_file, votes
from .jsontext import encode
from .layout import Box
from .manifest import Manifest, OptimizerEntry, Piece, TensorEntry
from .state import LocalTensor, ModelState, OptimizerState, model_state, optimizer_state


def save(root: str | os.PathLike, *, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None,
         scheduler: object | None = None, loader: object | None = None, extra: object = None, keep_last: int | None = None) -> Path:
    """Write the state of a training run to `root/step-<step>`; a collective of all ranks. Returns the directory.

    Args:
        root: directory that all ranks share; made if missing.
        step: number of finished steps; names the checkpoint.
        model: parameters (DTensor or plain) and persistent buffers are saved.
        optimizer: any torch optimizer over the model's parameters.
        scheduler, loader: objects with `state_dict()`, the same on every rank; numbers, text, lists, tables.
        extra: more of the same kind.
        keep_last: afterwards delete all but so many committed checkpoints (1 or more); None deletes nothing.

    Raises:
        CheckpointError: on every rank, with the same message naming rank and cause; older checkpoints are untouched.
        RankError: a rank died.
    """
    return _Save(Path(root), step, keep_last).run(model, optimizer, scheduler, loader, extra)


class _Save:
    """One save on one rank."""

    def __init__(self, root: Path, step: int, keep_last: int | None) -> None:
        self.root, self.step, self.keep_last = root, step, keep_last
        self.rank, self.world_size = votes.rank(), votes.world_size()
        self.temporary: Path | None = None
        self.model = ModelState()
        self.optimizer: OptimizerState | None = None
        self.differing: set[str] = set()

    def run(self, model, optimizer, scheduler, loader, extra) -> Path:
        """The four stages; see the module's docstring."""
        what = f"save step {self.step}"
        try:
            opened = votes.agree(what, lambda: self.open(model, optimizer, scheduler, loader, extra))
            self.temporary = self.root / opened[0]["temporary"]
            votes.same_everywhere(self.facts)
            self.differing = self.find_differing([vote["replicas"] for vote in opened])
            written = votes.agree(what, self.write)
            votes.agree(what, lambda: self.commit(written))
        except CheckpointError:                              # raised on every rank, so all can wait until nothing is left over
            self.clean_up()
            with contextlib.suppress(RankError):
                collectives.barrier(label=votes.LABEL)
            raise
        except BaseException:
            self.clean_up()
            raise
        if self.rank == 0 and self.keep_last is not None:
            retention.prune(self.root, self.target, self.keep_last)
        return self.target

    @property
    def target(self) -> Path:
        return self.root / layout.step_name(self.step)

    def open(self, model, optimizer, scheduler, loader, extra) -> dict:
        """Stage 1: look at everything (so that what cannot be saved fails before a file exists), make the directory."""
        if type(self.step) is not int or not 0 <= self.step < 10**18:
            raise CheckpointError(f"step is {self.step!r}; give a whole number from 0")
        if self.keep_last is not None and (type(self.keep_last) is not int or self.keep_last < 1):
            raise CheckpointError(f"keep_last is {self.keep_last!r}; give 1 or more, or None to keep all")
        self.model = model_state(model)
        self.optimizer = optimizer_state(optimizer, self.model) if optimizer is not None else None
        section = lambda holder, name: None if holder is None else encode(holder.state_dict(), f"the {name} state")  # noqa: E731
        self.scheduler, self.loader = section(scheduler, "scheduler"), section(loader, "loader")
        self.extra = encode(extra, "extra")
        self.facts = self.replicated_facts()
        return {"replicas": self.replica_digests(), "temporary": self.make_temporary() if self.rank == 0 else ""}

    def make_temporary(self) -> str:
        """Rank 0: clear away what dead runs left and make the directory; returns its name."""
        layer, temporary = files.layer(), layout.temporary_name(self.step, uuid.uuid4().hex)
        if os.path.lexists(self.target):
            raise CheckpointError(f"{self.target} exists already and is never written into; save another step or delete it first")
        self.root.mkdir(parents=True, exist_ok=True)
        retention.sweep(self.root)
        self.temporary = self.root / temporary
        layer.mkdir(self.temporary)
        return temporary

    def replica_digests(self) -> dict[str, list]:
        """Name -> offsets and digest of what other ranks should hold alike."""
        result = {}
        for local in self.locals():
            if local.replicas > 1:
                state = xxhash.xxh3_128()
                for piece in safetensors_file.byte_pieces(local.part):
                    state.update(piece)
                result[local.name] = [list(local.box.offsets), state.hexdigest()]
        return result

    def find_differing(self, everyone: list[dict[str, list]]) -> set[str]:
        """The tensors of which two ranks hold the same box with different values; named in a warning of rank 0."""
        differing, first = set(), {}
        for replicas in everyone:
            for name, (offsets, digest) in replicas.items():
                if first.setdefault((name, tuple(offsets)), digest) != digest:
                    differing.add(name)
        if differing and self.rank == 0:
            warnings.warn(f"the ranks hold different values of {len(differing)} replicated tensors ({', '.join(sorted(differing)[:5])}); "
                          "the lowest rank's are saved, so that a resumed run may differ from this one", stacklevel=5)
        return differing

    def locals(self) -> list[LocalTensor]:
        """All tensors, of model and optimizer."""
        return [local for kind in self.sections().values() for local in kind]

    def sections(self) -> dict[str, list[LocalTensor]]:
        """The tensors by kind of file."""
        sections = {"model": list(self.model.tensors.values())}
        if self.optimizer:
            sections["optimizer"] = [local for _, _, local in self.optimizer.tensors.values()]
        return sections

    def replicated_facts(self) -> dict[str, object]:
        """What must be the same on every rank, by the name that an error calls it."""
        shapes = lambda tensors: {name: [local.dtype, list(local.shape)] for name, local in tensors.items()}  # noqa: E731
        facts = {"the step": [self.step, self.keep_last], "the scheduler state": self.scheduler, "the loader state": self.loader,
                 "extra": self.extra, "the names, shapes and types of the model": [shapes(self.model.tensors), self.model.aliases]}
        if self.optimizer:
            tensors = {name: local for name, (_, _, local) in self.optimizer.tensors.items()}
            facts["the optimizer's groups"] = [self.optimizer.kind, self.optimizer.groups]
            facts["the optimizer's state"] = [shapes(tensors), self.optimizer.values]
        else:
            facts["the optimizer's groups"] = facts["the optimizer's state"] = None
        return facts

    def write(self) -> dict:
        """Stage 2: this rank's files. Returns their sizes and digests, and the boxes in them."""
        sizes, boxes = {}, {}
        for kind, tensors in self.sections().items():
            mine = {local.name: (local, box) for local in tensors if (box := local.written(local.name in self.differing)) is not None}
            name = layout.shard_name(kind, self.rank, self.world_size)
            written = self.write_shard(name, mine)
            sizes[name] = (written.bytes, written.digest)
            boxes[kind] = {label: [box.offsets, box.sizes, written.tensors[label]] for label, (_, box) in mine.items()}
        name = layout.random_name(self.rank)
        with files.Writer(self.temporary / name) as out:
            out.write(random_state.capture(self.step, self.rank))
        sizes[name] = (out.bytes, out.digest)
        return {"files": sizes, "boxes": boxes}

    def write_shard(self, name: str, mine: dict[str, tuple[LocalTensor, Box]]) -> safetensors_file.Written:
        """One safetensors file, recorded in the ledger."""
        tensors = {label: local.slice(box) for label, (local, box) in mine.items()}
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        with ledger.span(Lane.CHECKPOINT, "write", unit=name, phase="checkpoint", nbytes=nbytes):
            return safetensors_file.write(self.temporary / name, tensors, shard_metadata(mine, self.step, self.rank, self.world_size))

    def commit(self, written: list[dict]) -> None:
        """Stage 3, rank 0: manifest, flush, rename, flush. A flush that fails after the rename takes the rename back."""
        if self.rank != 0:
            return
        manifest = self.manifest(written)
        manifest.check(self.target / layout.MANIFEST)
        layer = files.layer()
        with files.Writer(self.temporary / layout.MANIFEST) as out:
            out.write(manifest.to_bytes())
        layer.fsync_dir(self.temporary)
        if os.path.lexists(self.target):                     # rename would replace an empty directory
            raise CheckpointError(f"{self.target} came into being during the save; one run at a time may write to a directory")
        layer.rename(self.temporary, self.target)
        try:
            layer.fsync_dir(self.root)
        except OSError:
            layer.rename(self.target, self.temporary)
            raise
        self.point()

    def manifest(self, written: list[dict]) -> Manifest:
        """Put the votes together."""
        def entry(kind: str, local: LocalTensor, parameter: str = "", key: str = "") -> TensorEntry:
            pieces = []
            for rank, vote in enumerate(written):
                if box := vote["boxes"][kind].get(local.name):
                    pieces.append(Piece(layout.shard_name(kind, rank, self.world_size), Box(tuple(box[0]), tuple(box[1])), box[2]))
            return TensorEntry(local.dtype, local.shape, tuple(pieces), parameter, key)

        model = {name: entry("model", local) for name, local in self.model.tensors.items()}
        optimizer = None
        if self.optimizer:
            tensors = {name: entry("optimizer", local, parameter, key) for name, (parameter, key, local) in self.optimizer.tensors.items()}
            optimizer = OptimizerEntry(self.optimizer.kind, self.optimizer.groups, tensors, self.optimizer.values)
        sizes = {name: tuple(facts) for vote in written for name, facts in vote["files"].items()}
        return Manifest(self.step, self.world_size, model, self.model.aliases, optimizer, self.scheduler, self.loader, self.extra, sizes)

    def point(self) -> None:
        """Replace the advisory file `latest`, atomically. The checkpoint is safe by now, so a failure is a warning."""
        pointer, beside = self.root / layout.POINTER, self.root / layout.temporary_name(self.step, uuid.uuid4().hex)
        try:
            with files.Writer(beside) as out:
                out.write(f"{self.target.name}\n".encode())
            files.layer().replace(beside, pointer)
            files.layer().fsync_dir(self.root)
        except OSError as error:
            warnings.warn(f"could not update {pointer} ({error.strerror}); it is for people only and load does without it", stacklevel=6)

    def clean_up(self) -> None:
        """Remove the temporary directory after a failure; what cannot be removed is swept by the next save."""
        if self.rank == 0 and self.temporary is not None:
            try:
                retention.remove_tree(self.temporary)
            except OSError as error:
                warnings.warn(f"could not remove {self.temporary} ({error.strerror}); the next save tries again", stacklevel=4)


def shard_metadata(mine: dict[str, tuple[LocalTensor, Box]], step: int, rank: int, world_size: int) -> dict[str, str]:
    """What a shard says about itself. `DCP_SHARDING_INFO` and `DCP_VERSION` are for torch's HuggingFaceStorageReader."""
    text = lambda value: json.dumps(value, sort_keys=True)  # noqa: E731
    return {
        "format": "pt", "step": str(step), "rank": str(rank), "world_size": str(world_size),
        "global_shapes": text({name: list(local.shape) for name, (local, _) in mine.items()}),
        "DCP_SHARDING_INFO": text({name: {"saved_offsets": list(box.offsets)} for name, (_, box) in mine.items()}),
        "DCP_VERSION": "1.0",
    }
