"""From a snapshot to a committed directory: every rank writes its part, all vote, and one rename makes it real.

    1  all     take the snapshot; rank 0 makes step-00000120.tmp-<unique>/               vote
    2  each    writes and flushes its model, optimizer and random-state file             vote: bytes and digests
    3  rank 0  checks the votes, writes and flushes the manifest and the directory,
               renames it to step-00000120/, flushes the parent, replaces `latest`       vote
    4  rank 0  deletes old checkpoints

A process killed anywhere in this leaves the old checkpoints as they were, and the new one either whole or under its temporary
name. A committed directory is never written into. The same code serves a save that the caller waits for and one in a thread; in
the thread it has a process group of its own, and must never touch the tensors of the model.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from .. import collectives, ledger
from ..errors import CheckpointError, RankError
from ..ledger import Lane
from . import files, layout, retention, safetensors_file, votes
from .layout import Box
from .manifest import Manifest, OptimizerEntry, Piece, TensorEntry
from .snapshot import Snapshot, differing
from .state import LocalTensor


class Commit:
    """One save on one rank. `group`: who votes (None: everybody, over the default process group)."""

    def __init__(self, root: Path, step: int, group: dist.ProcessGroup | None = None) -> None:
        self.root, self.step, self.group = root, step, group
        self.rank, self.world_size = votes.rank(), votes.world_size()
        self.temporary: Path | None = None
        self.snapshot: Snapshot | None = None
        self.differing: set[str] = set()

    def run(self, take: Callable[[], Snapshot]) -> Path:
        """The four stages; see the module's docstring. `take` gives the snapshot, or raises what keeps it from being saved."""
        what = f"save step {self.step}"
        try:
            opened = votes.agree(what, lambda: self.open(take), self.group)
            self.temporary = self.root / opened[0]["temporary"]
            votes.same_everywhere(self.snapshot.facts(), self.group)
            self.find_differing([vote["replicas"] for vote in opened])
            written = votes.agree(what, self.write, self.group)
            votes.agree(what, lambda: self.commit(written), self.group)
        except CheckpointError:                              # raised on every rank, so all can wait until nothing is left over
            self.clean_up()
            with contextlib.suppress(RankError):
                collectives.barrier(self.group, votes.LABEL)
            raise
        except BaseException:
            self.clean_up()
            raise
        if self.rank == 0 and self.snapshot.keep_last is not None:
            retention.prune(self.root, self.target, self.snapshot.keep_last)
        return self.target

    @property
    def target(self) -> Path:
        return self.root / layout.step_name(self.step)

    def open(self, take: Callable[[], Snapshot]) -> dict:
        """Stage 1: look at everything (so that what cannot be saved fails before a file exists), make the directory."""
        self.snapshot = take()
        return {"replicas": self.snapshot.replica_digests(), "temporary": self.make_temporary() if self.rank == 0 else ""}

    def make_temporary(self) -> str:
        """Rank 0: clear away what dead runs left and make the directory; returns its name."""
        temporary = layout.temporary_name(self.step, uuid.uuid4().hex)
        if os.path.lexists(self.target):
            raise CheckpointError(f"{self.target} exists already and is never written into; save another step or delete it first")
        files.make_directories(self.root)
        retention.sweep(self.root)
        self.temporary = self.root / temporary
        files.layer().mkdir(self.temporary)
        return temporary

    def find_differing(self, everyone: list[dict[str, list]]) -> None:
        """Note the tensors of which ranks hold different values; rank 0 names them in a warning."""
        self.differing = differing(everyone)
        if self.differing and self.rank == 0:
            some = ", ".join(sorted(self.differing)[:5])
            warnings.warn(f"the ranks hold different values of {len(self.differing)} replicated tensors ({some}); the lowest rank's are "
                          "saved, so that a resumed run may differ from this one", stacklevel=5)

    def write(self) -> dict:
        """Stage 2: this rank's files. Returns their sizes and digests, and the boxes in them.

        All are written before the first is flushed, so that the drive never waits for bytes while it has a file to finish.
        """
        writers: dict[str, files.Writer] = {}
        boxes = {}
        with contextlib.ExitStack() as flushed:
            for kind, tensors in self.snapshot.sections.items():
                mine = {name: (local, box) for name, local in tensors.items() if (box := local.written(name in self.differing)) is not None}
                name = layout.shard_name(kind, self.rank, self.world_size)
                writers[name] = flushed.enter_context(files.Writer(self.temporary / name))
                digests = self.write_shard(name, writers[name], mine)
                boxes[kind] = {label: [box.offsets, box.sizes, digests[label]] for label, (_, box) in mine.items()}
            name = layout.random_name(self.rank)
            writers[name] = flushed.enter_context(files.Writer(self.temporary / name))
            writers[name].write(self.snapshot.random)
            began = ledger.now()
        ledger.add_event(Lane.CHECKPOINT, "flush", f"rank {self.rank}", "checkpoint", began, ledger.now())
        return {"files": {name: (out.bytes, out.digest) for name, out in writers.items()}, "boxes": boxes}

    def write_shard(self, name: str, out: files.Writer, mine: dict[str, tuple[LocalTensor, Box]]) -> dict[str, str]:
        """One safetensors file, recorded in the ledger; returns the digest of each tensor in it."""
        tensors = {label: local.slice(box) for label, (local, box) in mine.items()}
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        with ledger.span(Lane.CHECKPOINT, "write", unit=name, phase="checkpoint", nbytes=nbytes):
            return safetensors_file.stream(out, tensors, shard_metadata(mine, self.step, self.rank, self.world_size))

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

        taken, state = self.snapshot, self.snapshot.optimizer
        model = {name: entry("model", local) for name, local in taken.model.tensors.items()}
        optimizer = None
        if state:
            tensors = {name: entry("optimizer", local, parameter, key) for name, (parameter, key, local) in state.tensors.items()}
            optimizer = OptimizerEntry(state.kind, state.groups, tensors, state.values)
        sizes = {name: tuple(facts) for vote in written for name, facts in vote["files"].items()}
        tables = taken.scheduler, taken.loader, taken.extra
        return Manifest(self.step, self.world_size, model, taken.model.aliases, optimizer, *tables, sizes)

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
