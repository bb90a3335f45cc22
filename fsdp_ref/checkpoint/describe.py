"""A checkpoint in words and sizes, for people and (`facts`) for programs. Reads the manifest only; `verify` reads the bytes."""

from __future__ import annotations

import os
from pathlib import Path

from .jsontext import dump
from .manifest import Manifest, TensorEntry


def describe(step_dir: str | os.PathLike) -> str:
    """A text of a few lines a section and one line a tensor, the largest first.

    Raises:
        CheckpointError: there is no readable manifest.
    """
    path = Path(step_dir)
    manifest = Manifest.read(path)
    total = sum(size for size, _ in manifest.files.values())
    lines = [
        f"{path.name}: step {manifest.step}, written by {_count(manifest.world_size, 'rank')}, {len(manifest.files)} files, "
        f"{human_bytes(total)}",
        f"model: {_summary(manifest.model)}",
    ]
    lines += _tensor_lines(manifest.model)
    lines += [f"  {alias}  is {name}" for alias, name in sorted(manifest.aliases.items())]
    if manifest.optimizer:
        lines.append(f"optimizer: {manifest.optimizer.kind}, {_summary(manifest.optimizer.tensors)}, "
                     f"{_count(len(manifest.optimizer.groups), 'group')}")
        lines += [f"  group {index}: {len(group['parameters'])} parameters, {dump(group['options'])}"
                  for index, group in enumerate(manifest.optimizer.groups)]
        lines += _tensor_lines(manifest.optimizer.tensors)
    else:
        lines.append("optimizer: not saved")
    for name in ("scheduler", "loader", "extra"):
        value = getattr(manifest, name)
        lines.append(f"{name}: {'not saved' if value is None else dump(value)}")
    lines.append(f"random state: of {_count(manifest.world_size, 'rank')}")
    lines.append("files:")
    lines += [f"  {name}  {human_bytes(size)}  {digest}" for name, (size, digest) in sorted(manifest.files.items())]
    return "\n".join(lines)


def facts(step_dir: str | os.PathLike) -> dict:
    """The same as a table that JSON can carry; sizes in bytes. Raises CheckpointError when there is no readable manifest."""
    manifest = Manifest.read(Path(step_dir))
    sections = {kind: {"tensors": len(tensors), "elements": sum(entry.elements for entry in tensors.values()),
                       "bytes": sum(entry.bytes for entry in tensors.values())} for kind, tensors in manifest.sections().items()}
    tensors = [{"section": kind, "name": name, "dtype": entry.dtype, "shape": list(entry.shape), "elements": entry.elements,
                "bytes": entry.bytes, "pieces": len(entry.pieces)}
               for kind, tensors in manifest.sections().items() for name, entry in by_size(tensors)]
    optimizer = manifest.optimizer and {"class": manifest.optimizer.kind, "groups": manifest.optimizer.groups}
    return {
        "step": manifest.step, "world_size": manifest.world_size, "bytes": sum(size for size, _ in manifest.files.values()),
        "sections": sections, "tensors": tensors, "aliases": manifest.aliases, "optimizer": optimizer, "scheduler": manifest.scheduler,
        "loader": manifest.loader, "extra": manifest.extra,
        "files": {name: {"bytes": size, "digest": digest} for name, (size, digest) in sorted(manifest.files.items())},
    }


def by_size(tensors: dict[str, TensorEntry]) -> list[tuple[str, TensorEntry]]:
    """The largest first; equally large ones by name."""
    return sorted(tensors.items(), key=lambda item: (-item[1].bytes, item[0]))


def human_bytes(count: int) -> str:
    """`1.5 MiB` for 1572864."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def _summary(tensors: dict[str, TensorEntry]) -> str:
    elements, nbytes = (sum(getattr(entry, what) for entry in tensors.values()) for what in ("elements", "bytes"))
    return f"{len(tensors)} tensors, {elements:,} elements, {human_bytes(nbytes)}"


def _tensor_lines(tensors: dict[str, TensorEntry]) -> list[str]:
    return [f"  {name}  {entry.dtype}  {list(entry.shape)}  in {_count(len(entry.pieces), 'piece')}  {human_bytes(entry.bytes)}"
            for name, entry in by_size(tensors)]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
