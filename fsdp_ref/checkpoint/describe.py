"""A checkpoint in words and sizes, for people. Reads the manifest only; `verify` reads the bytes."""

from __future__ import annotations

import os
from pathlib import Path

from .jsontext import dump
from .manifest import Manifest


def describe(step_dir: str | os.PathLike) -> str:
    """A text of a few lines a section and one line a tensor.

    Raises:
        CheckpointError: there is no readable manifest.
    """
    path = Path(step_dir)
    manifest = Manifest.read(path)
    total = sum(size for size, _ in manifest.files.values())
    elements = sum(entry.elements for entry in manifest.model.values())
    lines = [
        f"{path.name}: step {manifest.step}, written by {manifest.world_size} rank{'s' * (manifest.world_size > 1)}, "
        f"{len(manifest.files)} files, {human_bytes(total)}",
        f"model: {len(manifest.model)} tensors, {elements:,} elements, {human_bytes(sum(e.bytes for e in manifest.model.values()))}",
    ]
    lines += [f"  {name}  {entry.dtype}  {list(entry.shape)}  in {len(entry.pieces)} piece{'s' * (len(entry.pieces) > 1)}"
              for name, entry in sorted(manifest.model.items())]
    lines += [f"  {alias}  is {name}" for alias, name in sorted(manifest.aliases.items())]
    if manifest.optimizer:
        tensors = manifest.optimizer.tensors.values()
        lines.append(f"optimizer: {manifest.optimizer.kind}, {len(tensors)} tensors, {human_bytes(sum(e.bytes for e in tensors))}, "
                     f"{len(manifest.optimizer.groups)} group{'s' * (len(manifest.optimizer.groups) > 1)}")
        lines += [f"  group {index}: {len(group['parameters'])} parameters, {dump(group['options'])}"
                  for index, group in enumerate(manifest.optimizer.groups)]
    for name in ("scheduler", "loader", "extra"):
        value = getattr(manifest, name)
        lines.append(f"{name}: {'not saved' if value is None else dump(value)}")
    lines.append(f"random state: of {manifest.world_size} rank{'s' * (manifest.world_size > 1)}")
    lines.append("files:")
    lines += [f"  {name}  {human_bytes(size)}  {digest}" for name, (size, digest) in sorted(manifest.files.items())]
    return "\n".join(lines)


def human_bytes(count: int) -> str:
    """`1.5 MiB` for 1572864."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
