"""The safetensors file format: a writer that gives the same bytes for the same tensors, and a reader that believes nothing.

    8 bytes   N, little-endian
    N bytes   JSON: {"__metadata__": {text: text}, "<name>": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    the rest  the tensors, row-major, little-endian, without gaps; offsets count from here

The format is that of https://github.com/huggingface/safetensors (README, "Format"). The writer keeps its order (widest type
first, then by name) and pads the header to 8 bytes, so every tensor is aligned; it streams, so a file never stands in memory
whole. The reader also refuses what the specification forbids and the reference reader lets pass: a name twice, a header that
does not start with `{`. A tensor's name is text, never a path.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from ..errors import CheckpointError
from . import files
from .jsontext import parse

HEADER_LIMIT = 25_000_000           # bytes; what the Hugging Face hub's remote parser takes
U64 = 2**64

# In the reference writer's order: within one width, this order is kept.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32,
    "F32": torch.float32, "C64": torch.complex64, "F64": torch.float64, "I64": torch.int64, "U64": torch.uint64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = {name: index for index, name in enumerate(DTYPES)}


def dtype_name(dtype: torch.dtype, what: str) -> str:
    """`F32` for torch.float32. Raises CheckpointError naming `what` for a type the format has no name for (complex128, quantized)."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise CheckpointError(f"{what} has the type {dtype}, for which safetensors has no name; convert it before saving") from None


@dataclass(frozen=True)
class Entry:
    """One tensor in a file: the bytes from `begin` to `end`, counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a file says it holds. `start`: where in the file the first tensor begins, in bytes."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    start: int


# -- writing ------------------------------------------------------------------------------------------------------------------


def file_order(dtypes: dict[str, str]) -> list[str]:
    """The names in the order in which the writer puts the tensors: widest type first, then by name."""
    return sorted(dtypes, key=lambda name: (-_ORDER[dtypes[name]], name))


def make_header(kinds: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]) -> tuple[bytes, list[str]]:
    """The file's first bytes (length and padded JSON) and the order in which the tensors follow. `kinds`: name -> (type, shape).

    Raises:
        CheckpointError: a name that the format cannot hold, or a header above 25 MB.
    """
    if "__metadata__" in kinds:
        raise CheckpointError("a tensor cannot be called __metadata__ in a safetensors file; rename the parameter")
    order = file_order({name: dtype for name, (dtype, _) in kinds.items()})
    header: dict = {"__metadata__": {name: metadata[name] for name in sorted(metadata)}}
    offset = 0
    for name in order:
        dtype, shape = kinds[name]
        end = offset + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise CheckpointError(f"the header of one file would take {len(text)} bytes and the format allows {HEADER_LIMIT}; use more ranks")
    return len(text).to_bytes(8, "little") + text, order


@dataclass(frozen=True)
class Written:
    """A file that was written: its size in bytes, its digest, and the digest of each tensor's bytes."""

    bytes: int
    digest: str
    tensors: dict[str, str]


def write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> Written:
    """Write a new file and flush it to the drive. As for `stream`."""
    with files.Writer(path) as out:
        digests = stream(out, tensors, metadata)
    return Written(out.bytes, out.digest, digests)


def write_pieces(path: Path, kinds: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str],
                 pieces: Callable[[str], Iterable[memoryview]]) -> Written:
    """As `write`, for tensors that are not in memory. As for `stream_pieces`."""
    with files.Writer(path) as out:
        digests = stream_pieces(out, kinds, metadata, pieces)
    return Written(out.bytes, out.digest, digests)


def stream(out: files.Writer, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> dict[str, str]:
    """Write all of a file into `out`; returns the digest of each tensor's bytes.

    The tensors may lie on any device and need not be contiguous; at most one piece of 1 MiB is copied at a time.
    """
    kinds = {name: (dtype_name(tensor.dtype, name), tuple(tensor.shape)) for name, tensor in tensors.items()}
    return stream_pieces(out, kinds, metadata, lambda name: byte_pieces(tensors[name]))


def stream_pieces(out: files.Writer, kinds: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str],
                  pieces: Callable[[str], Iterable[memoryview]]) -> dict[str, str]:
    """As `stream`, where `pieces(name)` gives a tensor's bytes, in row-major order, when its turn comes."""
    header, order = make_header(kinds, metadata)
    digests = {}
    out.write(header)
    for name in order:
        state = xxhash.xxh3_128()
        for piece in pieces(name):
            out.write(piece)
            state.update(piece)
        digests[name] = f"xxh3-128:{state.hexdigest()}"
    return digests


def byte_pieces(tensor: torch.Tensor, limit: int = files.PIECE) -> Iterator[memoryview]:
    """The tensor's bytes in row-major order, in views of at most `limit` bytes; copied only where they must be."""
    tensor = tensor.detach()
    size = tensor.element_size()
    if tensor.numel() == 0:
        return
    if not tensor.is_contiguous() and tensor.numel() * size > limit:
        row = tensor[0].numel() * size
        if row > limit:
            for part in tensor.unbind(0):
                yield from byte_pieces(part, limit)
        else:
            for part in tensor.split(limit // row):
                yield from byte_pieces(part, limit)
        return
    flat = tensor.contiguous().reshape(-1)
    for part in flat.split(max(1, limit // size)):
        yield memoryview(part.cpu().view(torch.uint8).numpy())


# -- reading ------------------------------------------------------------------------------------------------------------------


def read_header(path: Path) -> Header:
    """What the file at `path` holds, after every check the format allows.

    Raises:
        CheckpointError: the file is no safetensors file or is cut short; the message names it.
    """
    with files.opened(path) as (descriptor, size):
        read = lambda count, offset: _read_exactly(descriptor, count, offset, path)  # noqa: E731
        if size < 8:
            raise _damaged(path, f"it has {size} bytes and the length of the header alone takes 8")
        length = int.from_bytes(read(8, 0), "little")
        if length > HEADER_LIMIT or 8 + length > size:
            raise _damaged(path, f"its header claims {length} bytes; the file has {size} and the limit is {HEADER_LIMIT}")
        data = read(length, 8)
    if not data.startswith(b"{"):
        raise _damaged(path, "its header does not start with {")
    header = parse(data, f"the header of {path}", floats=False)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(type(value) is str for value in metadata.values()):
        raise _damaged(path, "its __metadata__ is not a table of text")
    entries = {name: _entry(path, name, fields) for name, fields in header.items()}
    _check_offsets(path, entries, size - 8 - length)
    return Header(entries, metadata, 8 + length)


def _entry(path: Path, name: str, fields: object) -> Entry:
    """One tensor's line of the header, checked on its own."""
    label = f"tensor {name[:200]!r}"
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
        raise _damaged(path, f"{label} lacks dtype, shape or data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if type(dtype) is not str or dtype not in DTYPES:
        raise _damaged(path, f"{label} has the unknown type {str(dtype)[:40]!r}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise _damaged(path, f"{label} has a shape or offsets that are not whole numbers from 0 to 2**64 - 1")
    count = 1
    for length in shape:
        count *= length
        if count >= U64:
            raise _damaged(path, f"{label} has a shape of more than 2**64 elements")
    nbytes = count * DTYPES[dtype].itemsize
    begin, end = offsets
    if nbytes >= U64 or end - begin != nbytes:
        raise _damaged(path, f"{label} takes {nbytes} bytes by its shape and {end - begin} by its offsets")
    return Entry(dtype, tuple(shape), begin, end)


def _check_offsets(path: Path, entries: dict[str, Entry], available: int) -> None:
    """The tensors lie one after the other, from the first byte behind the header to the last of the file."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            raise _damaged(path, f"tensor {name[:200]!r} begins at byte {entry.begin} and the one before ends at {position}")
        position = entry.end
    if position != available:
        raise _damaged(path, f"its tensors take {position} bytes and the file holds {available}")


def _naturals(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < U64 for value in values)


def _read_exactly(descriptor: int, count: int, offset: int, path: Path) -> bytes:
    buffer = bytearray(count)
    if count and files.layer().read_into(descriptor, memoryview(buffer), offset) != count:
        raise _damaged(path, "it became shorter while it was read")
    return bytes(buffer)


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {why}; restore the checkpoint from a copy or go back to an older one")
