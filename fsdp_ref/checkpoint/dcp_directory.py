"""Read a directory of torch's distributed checkpoint (DCP) without believing it, and without running what it holds.

DCP's index, `.metadata`, is a pickle, and torch reads it with `pickle.load`, which runs any code that someone put there. Here it is
read by an unpickler that knows DCP's own record classes and nothing else, and what comes out is checked like any other untrusted
index: file names, byte ranges, shapes, coverage. A tensor or a value is a `torch.save` file inside a `.distcp` file and is read with
`weights_only=True`. Memory: one tensor and one of its chunks at a time, each bounded by the bytes that the file really has.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.serialization import _get_layout

from ..errors import CheckpointError
from . import files, layout
from .layout import Box
from .safetensors_file import DTYPES, dtype_name

METADATA = ".metadata"
LIMIT = 256 << 20           # bytes of a .metadata
VALUE_LIMIT = 64 << 20      # bytes of a value that is no tensor

_ALLOWED: dict[tuple[str, str], object] = {
    **{("torch.distributed.checkpoint.metadata", name): getattr(records, name) for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex",
        "StorageMeta", "_MEM_FORMAT_ENCODING")},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): torch.Size, ("torch.serialization", "_get_layout"): _get_layout,
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in DTYPES.values()},
    **{("pathlib", kind): lambda *parts: "/".join(map(str, parts)) for kind in ("Path", "PosixPath", "WindowsPath", "PurePosixPath")},
}


class _Unpickler(pickle.Unpickler):
    """Knows DCP's records; a path becomes plain text."""

    def find_class(self, module: str, name: str) -> object:
        """The class of that name, if it is one of DCP's own."""
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of such an index") from None


@dataclass(frozen=True)
class Range:
    """Where a record lies: `length` bytes from `begin` in `file`."""

    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class Stored:
    """A tensor: type, global shape, and its chunks with their places."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[Box, Range], ...]


class DcpDirectory:
    """The entries of a DCP directory.

    Attributes:
        tensors: path -> tensor. A path is the tuple of keys that led to it in the nested state: `("model", "embed.weight")`.
        values: path -> place of a value that is no tensor.
    """

    def __init__(self, directory: Path) -> None:
        """Read and check the index. Raises CheckpointError."""
        self.directory = directory
        self.tensors: dict[tuple, Stored] = {}
        self.values: dict[tuple, Range] = {}
        path = directory / METADATA
        try:
            self._take(_unpickle(files.read_small(path, LIMIT)))
        except OSError as error:
            raise CheckpointError(f"{error.filename or path} cannot be read ({error.strerror}); give a directory that dcp.save "
                                  "wrote") from error
        except CheckpointError as error:
            raise CheckpointError(f"{path} is not accepted: {error}") from error
        except Exception as error:                           # a hostile pickle may raise anything
            raise CheckpointError(f"{path} is not accepted ({type(error).__name__}: {str(error)[:200]}); do not use this "
                                  "checkpoint") from error

    def tensor(self, path: tuple) -> torch.Tensor:
        """A whole tensor, put together from its chunks.

        Raises:
            CheckpointError: a record is damaged or is not what the index says.
        """
        stored = self.tensors[path]
        whole = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        for box, place in stored.chunks:
            part = self._load(place)
            if not isinstance(part, torch.Tensor) or (part.dtype, tuple(part.shape)) != (whole.dtype, box.sizes):
                raise CheckpointError(f"the record of {'.'.join(map(str, path))} in {self.directory / place.file} is not the tensor that "
                                      f"{METADATA} promises; use another copy")
            target = whole
            for dimension, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                target = target.narrow(dimension, offset, size)
            target.copy_(part)
        return whole

    def value(self, path: tuple) -> object:
        """A value that is no tensor: numbers, text, lists, tables. Raises CheckpointError."""
        return self._load(self.values[path])

    # -- the index --------------------------------------------------------------------------------------------------------------

    def _take(self, metadata: records.Metadata) -> None:
        """Check every entry of the index and keep what is needed."""
        sizes: dict[str, int] = {}
        places = {}
        for index, info in metadata.storage_data.items():
            offset = None if index.offset is None else _naturals(index.offset)
            places[_text(index.fqn), offset] = self._range(info, sizes)
        for key, entry in metadata.state_dict_metadata.items():
            path = self._path(_text(key), metadata.planner_data or {})
            if path in self.tensors or path in self.values:
                raise CheckpointError(f"two entries have the path {path}")
            if type(entry) is records.BytesStorageMetadata:
                self.values[path] = places[key, None]
                if self.values[path].length > VALUE_LIMIT:
                    raise CheckpointError(f"the value {key} claims {self.values[path].length} bytes")
            else:
                self.tensors[path] = _stored(key, entry, places)

    def _range(self, info: _StorageInfo, sizes: dict[str, int]) -> Range:
        """A place in a file, if the file is in the directory and has those bytes."""
        name = getattr(info, "relative_path", None)
        if type(info) is not _StorageInfo or not layout.plain_name(name, ".distcp"):
            raise CheckpointError(f"a record lies in {str(name)[:200]!r}, which is no plain name of a .distcp file")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError("its records are compressed or encrypted by an extension; save it without")
        if name not in sizes:
            with files.opened(self.directory / name) as (_, sizes[name]):
                pass
        begin, length = _naturals((info.offset, info.length))
        if begin + length > sizes[name]:
            raise CheckpointError(f"{name} has {sizes[name]} bytes and a record in it is to end at {begin + length}")
        return Range(name, begin, length)

    def _path(self, key: str, planner_data: dict) -> tuple:
        """The tuple of keys of an entry; DCP keeps it beside the entries, and joined by points it must give the entry's name."""
        path = tuple(planner_data.get(key, (key,)))
        if ".".join(map(str, path)) != key or not all(type(part) in (str, int) for part in path):
            raise CheckpointError(f"{key[:200]!r} is said to have the path {str(path)[:200]}")
        return path

    def _load(self, place: Range) -> object:
        """One record, in memory and then read by torch without running anything."""
        buffer = bytearray(place.length)
        path = self.directory / place.file
        try:
            with files.opened(path) as (descriptor, _):
                if files.layer().read_into(descriptor, memoryview(buffer), place.begin) != place.length:
                    raise CheckpointError(f"{path} became shorter while it was read; use another copy")
            return torch.load(io.BytesIO(buffer), map_location="cpu", weights_only=True)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}); use another copy") from error
        except CheckpointError:
            raise
        except Exception as error:                           # torch raises many kinds for a damaged or hostile record
            raise CheckpointError(f"a record in {path} is damaged or holds more than plain values ({type(error).__name__}: "
                                  f"{str(error).splitlines()[0][:200]}); use another copy") from error


def _unpickle(data: bytes) -> records.Metadata:
    value = _Unpickler(io.BytesIO(data)).load()
    if type(value) is not records.Metadata:
        raise CheckpointError("it is no index of a distributed checkpoint")
    return value


def _stored(key: str, entry: records.TensorStorageMetadata, places: dict) -> Stored:
    """A tensor of the index: its chunks cover it once, and each has at least its own bytes in its file."""
    if type(entry) is not records.TensorStorageMetadata:
        raise CheckpointError(f"{key} is neither a tensor nor a value")
    dtype, shape = dtype_name(entry.properties.dtype, key), _naturals(entry.size)
    chunks = []
    for chunk in entry.chunks:
        box = Box(_naturals(chunk.offsets), _naturals(chunk.sizes))
        place = places[key, box.offsets]
        if box.volume * DTYPES[dtype].itemsize > place.length:
            raise CheckpointError(f"a chunk of {key} takes {box.volume} elements and its record has {place.length} bytes")
        chunks.append((box, place))
    layout.check_cover(key, shape, [box for box, _ in chunks])
    return Stored(dtype, shape, tuple(chunks))


def _naturals(values: object) -> tuple[int, ...]:
    values = tuple(values)
    if not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise CheckpointError(f"{str(values)[:80]} are not whole numbers from 0 to 2**63 - 1")
    return values


def _text(value: object) -> str:
    if type(value) is not str:
        raise CheckpointError(f"{str(value)[:80]} is no text")
    return value
