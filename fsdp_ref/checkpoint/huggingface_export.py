"""From a checkpoint to the files that Hugging Face's `from_pretrained` and the safetensors library read.

    model.safetensors                           all tensors fit into one file, or
    model-00001-of-00003.safetensors ...        several, cut greedily: the tensors in order of their names, each beside the one
    model.safetensors.index.json                before it if it still fits; one that is larger than the limit stands alone

Sizes are those of the tensors in decimal units, and the cut is the hub's (huggingface_hub, `split_state_dict_into_shards_factory`). A
tensor with several names is written once, under the name that the checkpoint gives it; the others stand in the file's
`__metadata__`. Only the model is exported, not the optimizer. Nothing here ever writes into a directory that has something in it.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from ..errors import CheckpointError, ConfigError
from . import files, safetensors_file
from .fit import some
from .manifest import Manifest
from .publish import new_directory
from .safetensors_file import DTYPES
from .streaming import TensorReader, convert
from .verify import examine

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def export_huggingface(step_dir: str | os.PathLike, out_dir: str | os.PathLike, *, max_shard_size: int | str = "5GB",
                       dtype: torch.dtype | None = None) -> Path:
    """Write a checkpoint's parameters and buffers as a Hugging Face model directory; returns it. No process group is needed.

    `from_pretrained` wants the model's configuration beside them: `model.config.save_pretrained(out_dir)` afterwards.

    Args:
        step_dir: one checkpoint; every byte of it is verified first.
        out_dir: a new or empty directory; it appears complete or not at all.
        max_shard_size: bytes of tensors in one file, as a number or like "500MB" (decimal).
        dtype: convert floating-point tensors to this type (to the nearest, ties to even, as torch does); integers, bools and complex
            numbers stay. Values that are too large for it become infinite, which a warning tells with the tensors' names.

    Raises:
        CheckpointError: the checkpoint is damaged, or `out_dir` is taken.
        ConfigError: `max_shard_size` or `dtype` makes no sense.
    """
    limit = _parse_size(max_shard_size)
    if dtype is not None and dtype not in _FLOATS:
        raise ConfigError(f"dtype is {dtype}; give torch.float16, bfloat16, float32 or float64")
    step_dir = Path(step_dir)
    export = _Export(examine(step_dir), step_dir, dtype)
    with new_directory(out_dir) as directory:
        export.write(directory, limit)
    export.warn()
    return Path(out_dir)


class _Export:
    """One export: what is written, and which values became infinite."""

    def __init__(self, manifest: Manifest, step_dir: Path, dtype: torch.dtype | None) -> None:
        self.manifest, self.dtype = manifest, dtype
        self.reader = TensorReader(step_dir, manifest.model)
        self.overflowed: list[str] = []
        self.kinds = {name: (self.exported_type(entry.dtype), entry.shape) for name, entry in sorted(manifest.model.items())}

    def exported_type(self, saved: str) -> str:
        """safetensors' name of the type that a tensor of the type `saved` gets."""
        convert = self.dtype is not None and DTYPES[saved].is_floating_point
        return safetensors_file.dtype_name(self.dtype, "dtype") if convert else saved

    def write(self, directory: Path, limit: int) -> None:
        """All files of the export."""
        shards = split(self.sizes(), limit)
        if len(shards) == 1:
            self.write_shard(directory / SINGLE, shards[0])
            return
        weight_map = {}
        for number, names in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self.write_shard(directory / file, names)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": sum(self.sizes().values())}, "weight_map": weight_map}
        with files.Writer(directory / INDEX) as out:
            out.write((json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode())

    def sizes(self) -> dict[str, int]:
        """Bytes of each exported tensor, in the order of the names."""
        return {name: self.manifest.model[name].elements * DTYPES[dtype].itemsize for name, (dtype, _) in self.kinds.items()}

    def write_shard(self, path: Path, names: list[str]) -> None:
        """One file, with the other names of its tensors in the metadata, as `safetensors.torch.save_model` notes them."""
        metadata = {alias: name for alias, name in self.manifest.aliases.items() if name in set(names)}
        if "format" in metadata:
            raise CheckpointError("a tensor called 'format' shares another one, and that name is taken in a file's metadata; rename it")
        safetensors_file.write_pieces(path, {name: self.kinds[name] for name in names}, {**metadata, "format": "pt"}, self.pieces)

    def pieces(self, name: str) -> Iterator[memoryview]:
        """The bytes of one exported tensor."""
        dtype = DTYPES[self.kinds[name][0]]
        for _, block in self.reader.blocks(name):
            converted, overflow = convert(block, dtype)
            if overflow and name not in self.overflowed:
                self.overflowed.append(name)
            yield from safetensors_file.byte_pieces(converted)

    def warn(self) -> None:
        """Tell which tensors hold values that the new type cannot."""
        if self.overflowed:
            warnings.warn(f"{self.dtype} cannot hold some values of {len(self.overflowed)} tensors ({some(self.overflowed)}), which are "
                          "infinite in the export now; export them as torch.bfloat16 or torch.float32", stacklevel=3)


def split(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Tensors into files, greedily and in the given order; one above the limit gets its own at once, the open file goes on behind it.

    >>> split({"a": 3, "c": 9, "b": 4, "d": 2}, limit=8)
    [['c'], ['a', 'b'], ['d']]
    """
    shards: list[list[str]] = []
    current: list[str] = []
    held = 0
    for name, size in sizes.items():
        if size > limit:
            shards.append([name])
            continue
        if held + size > limit:
            shards.append(current)
            current, held = [], 0
        current.append(name)
        held += size
    return shards + [current] if current or not shards else shards


def _parse_size(size: int | str) -> int:
    """Bytes: 5000000000 for "5GB"."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?B)\s*", size.upper()) if isinstance(size, str) else None
    count = size if type(size) is int else round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if count < 1:
        raise ConfigError(f"max_shard_size is {size!r}; give a number of bytes, or a text like 500MB or 5GB")
    return count
