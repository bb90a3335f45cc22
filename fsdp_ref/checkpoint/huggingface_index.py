"""What a Hugging Face model directory holds, read as if an enemy had written it.

The index names files and may name anything: a path outside, a pickle, a file that is not there. So a name must be a plain file name
ending in .safetensors, a file must be a plain file in the directory, and index and headers must say the same of every tensor. All
sizes are bounded before anything is read. Nothing here reads a tensor.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from . import files, safetensors_file
from .huggingface_export import INDEX, SINGLE
from .jsontext import parse
from .layout import Box, plain_name
from .manifest import Piece, TensorEntry
from .safetensors_file import Header

LIMIT = 25_000_000          # bytes of an index: a million tensors have no place in it, the largest known models have a tenth of that
SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Source:
    """Whole tensors in safetensors files. `aliases`: text pairs from the files' metadata that may be names of shared tensors."""

    directory: Path
    entries: dict[str, TensorEntry]
    headers: dict[str, Header]
    aliases: dict[str, str]


def read_source(source: Path) -> Source:
    """Look at a model directory, or at one .safetensors file.

    Raises:
        CheckpointError: something is missing, damaged, contradictory or leads elsewhere; the message names it.
    """
    try:
        if source.is_file():
            if not plain_name(source.name, SUFFIX):
                raise CheckpointError(f"{source} is no {SUFFIX} file; give one, or a directory that holds {SINGLE} or {INDEX}")
            directory, index, names = source.parent, None, [source.name]
        else:
            directory, index = source, _read_index(source)
            names = [SINGLE] if index is None else sorted(set(index["weight_map"].values()))
        headers = {name: safetensors_file.read_header(directory / name) for name in names}
    except OSError as error:
        raise CheckpointError(f"{error.filename or source} cannot be read ({error.strerror}); download the model again") from error
    if index is not None:
        _compare(source, index, headers)
    entries = {name: TensorEntry(entry.dtype, entry.shape, (Piece(file, Box.whole(entry.shape)),))
               for file, header in headers.items() for name, entry in header.entries.items()}
    aliases = {alias: name for header in headers.values() for alias, name in header.metadata.items()}
    return Source(directory, entries, headers, aliases)


def _read_index(directory: Path) -> dict | None:
    """The index, its file names checked; None when there is one file and no index. Opens nothing but the index."""
    path = directory / INDEX
    present = {entry.name for entry in os.scandir(directory)}
    if INDEX not in present:
        if SINGLE not in present:
            raise CheckpointError(f"{directory} has neither {SINGLE} nor {INDEX}; give the directory of a model in the safetensors format")
        return None
    index = parse(files.read_small(path, LIMIT), str(path))
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no table weight_map; download the model again")
    for name, file in weight_map.items():
        if not plain_name(file, SUFFIX):
            raise CheckpointError(f"{path} says that tensor {name[:200]!r} lies in {str(file)[:200]!r}, which is no plain name of a "
                                  f"{SUFFIX} file in that directory; do not use this model")
    named = set(weight_map.values())
    if missing := sorted(named - present):
        raise CheckpointError(f"{directory / missing[0]} is missing; download the model again")
    if extra := sorted(name for name in present - named if name.startswith("model") and name.endswith(SUFFIX)):
        raise CheckpointError(f"{directory / extra[0]} is not in {INDEX}; move it elsewhere")
    return index


def _compare(source: Path, index: dict, headers: dict[str, Header]) -> None:
    """Index and headers put the same tensors into the same files, and the total is right where the index states one."""
    weight_map = index["weight_map"]
    for name, file in weight_map.items():
        if name not in headers[file].entries:
            raise CheckpointError(f"{source / INDEX} says that tensor {name[:200]!r} lies in {file}, which does not hold it; download the "
                                  "model again")
    total = 0
    for file, header in headers.items():
        for name, entry in header.entries.items():
            if weight_map.get(name) != file:
                raise CheckpointError(f"{source / file} holds tensor {name[:200]!r} and {INDEX} does not say so; download the model again")
            total += entry.end - entry.begin
    metadata = index.get("metadata", {})
    stated = metadata.get("total_size", total) if isinstance(metadata, dict) else None
    if stated != total or isinstance(stated, bool):
        raise CheckpointError(f"{source / INDEX} states {str(stated)[:40]} bytes and the files hold {total}; download the model again")
