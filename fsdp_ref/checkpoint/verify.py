"""Is this checkpoint whole and undamaged? Every byte is read and every claim checked, without touching any model.

The checks go from cheap to dear: manifest, set of files and sizes, then each file: digest, header, what the shard says about
itself. The files are independent of each other, so ranks may share them out. Nothing here makes a collective.
"""

from __future__ import annotations

import os
from pathlib import Path

from .. import ledger
from ..errors import CheckpointError
from ..ledger import Lane
from . import diagnosis, files, layout, random_state, retention, safetensors_file
from .jsontext import dump, parse
from .manifest import Manifest


def verify(step_dir: str | os.PathLike) -> None:
    """Read a whole checkpoint and check it.

    Raises:
        CheckpointError: something is missing, damaged or does not belong; the message names the file and, where it can, the tensor.
    """
    examine(Path(step_dir))


def damages(step_dir: str | os.PathLike) -> list[str]:
    """Everything that is wrong with a checkpoint, one sentence each, not only the first thing; empty when it is whole."""
    step_dir = Path(step_dir)
    try:
        manifest = Manifest.read(step_dir)
        found = list(retention.size_faults(step_dir, manifest))
        for name in sorted(manifest.files):
            if not any(fault.startswith(f"{step_dir / name} ") for fault in found):
                try:
                    _examine_file(step_dir / name, manifest, digests=True)
                except CheckpointError as error:
                    found.append(str(error))
        return found
    except CheckpointError as error:
        return [str(error)]
    except OSError as error:
        return [_unreadable(error, step_dir)]


def examine(step_dir: Path, share: int = 0, shares: int = 1, digests: bool = True) -> Manifest:
    """The manifest of a checkpoint, after checking its files, or part `share` of `shares` of them.

    `digests=False` checks all but the bytes of tensors: sizes, headers, coverage, what shards say about themselves, random states.
    """
    try:
        manifest = Manifest.read(step_dir)
        retention.check_sizes(step_dir, manifest)
        for name in divide({name: size for name, (size, _) in manifest.files.items()}, shares)[share]:
            with ledger.span(Lane.CHECKPOINT, "verify", unit=name, phase="checkpoint", nbytes=manifest.files[name][0] if digests else 0):
                _examine_file(step_dir / name, manifest, digests)
        return manifest
    except OSError as error:
        raise CheckpointError(_unreadable(error, step_dir)) from error


def _unreadable(error: OSError, step_dir: Path) -> str:
    return f"{error.filename or step_dir} cannot be read ({error.strerror}); restore the checkpoint from a copy or go back to an older one"


def divide(sizes: dict[str, int], shares: int) -> list[list[str]]:
    """Files in parts that take about equally long to read: the largest first, each to the part that has least. In order of name.

    >>> divide({"a": 5, "b": 3, "c": 3}, 2)
    [['a'], ['b', 'c']]
    """
    parts: list[list[str]] = [[] for _ in range(shares)]
    loads = [0] * shares
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        parts[least].append(name)
        loads[least] += sizes[name]
    return [sorted(part) for part in parts]


def _examine_file(path: Path, manifest: Manifest, digests: bool) -> None:
    size, digest = manifest.files[path.name]
    if digests and files.digest_file(path) != (size, digest):
        raise CheckpointError(f"{path} is damaged: {diagnosis.changed(path, manifest)} does not give the digest that was noted when it was "
                              "written; restore the checkpoint from a copy or go back to an older one")
    rank = layout.rank_of(path.name)
    if path.name == layout.random_name(rank):
        random_state.read(path, manifest.step, rank, manifest.world_size)
        return
    kind = path.name.split("-")[0]
    _examine_shard(path, rank, manifest.sections()[kind], manifest)


def _examine_shard(path: Path, rank: int, tensors: dict, manifest: Manifest) -> None:
    """The shard holds exactly the pieces that the manifest puts there, and says of itself what the manifest says of it."""
    header = safetensors_file.read_header(path)
    expected = {name: (entry, piece.box) for name, entry in tensors.items() for piece in entry.pieces if piece.file == path.name}
    if odd := sorted(expected.keys() ^ header.entries.keys()):
        raise CheckpointError(f"{path} and the manifest differ about tensor {odd[0]}; restore the checkpoint from a copy")
    facts = {"step": manifest.step, "rank": rank, "world_size": manifest.world_size, "format": "pt", "DCP_VERSION": "1.0"}
    for name, value in facts.items():
        if header.metadata.get(name) != str(value):
            raise CheckpointError(f"{path} says it is of {name} {header.metadata.get(name)} and not {value}, it belongs elsewhere; restore "
                                  "the checkpoint from a copy")
    shapes = _table(header.metadata, "global_shapes", path)
    offsets = _table(header.metadata, "DCP_SHARDING_INFO", path)
    for name, (entry, box) in expected.items():
        held = header.entries[name]
        said = (held.dtype, held.shape, dump([shapes.get(name), offsets.get(name)]))               # as text: false is not 0 there
        if said != (entry.dtype, box.sizes, dump([list(entry.shape), {"saved_offsets": list(box.offsets)}])):
            raise CheckpointError(f"{path} and the manifest differ about type, shape or place of tensor {name}; restore the checkpoint "
                                  "from a copy")


def _table(metadata: dict[str, str], name: str, path: Path) -> dict:
    value = parse(metadata.get(name, "").encode(), f"{name} of {path}", floats=False)
    if not isinstance(value, dict):
        raise CheckpointError(f"{name} of {path} is no table; restore the checkpoint from a copy")
    return value
