"""What differs between two checkpoints, whatever numbers of ranks wrote them: settings in words, tensors element by element.

Both are verified first, then read together a block at a time. Values are the same when their bits are: NaN equals the same NaN, and
0.0 is not -0.0. Nothing is loaded into a model, and the memory is a few blocks of 8 MiB.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from . import layout, random_state
from .jsontext import dump
from .manifest import Manifest, TensorEntry
from .streaming import TensorReader, as_bytes
from .verify import examine

SECTIONS = ("step", "world_size", "model", "optimizer", "scheduler", "loader", "extra", "random_state")


@dataclass(frozen=True)
class Difference:
    """One thing that differs.

    Attributes:
        section: one of SECTIONS.
        name: the tensor, group or file; empty when the section is meant.
        what: in words, first against second.
        elements, of: how many elements of a tensor differ (0: it is not a matter of values), and how many it has.
        largest: the largest absolute difference; None where it is not a number (a NaN against a number) or makes no sense.
        first: index of the first element that differs.
    """

    section: str
    name: str
    what: str
    elements: int = 0
    of: int = 0
    largest: float | None = None
    first: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.section}{' ' * bool(self.name)}{self.name}: {self.what}"

    def to_json(self) -> dict:
        """As a table."""
        return asdict(self)


def compare(first: str | os.PathLike, second: str | os.PathLike, ignore: tuple[str, ...] = ()) -> list[Difference]:
    """Everything that differs between two step directories; empty when nothing does.

    Args:
        ignore: sections that are not looked at: ("step", "world_size", "random_state") for the same weights, saved at another time.

    Raises:
        CheckpointError: one of them is damaged.
    """
    paths = Path(first), Path(second)
    a, b = examine(paths[0]), examine(paths[1])
    found = [Difference(name, "", f"{getattr(a, name)} and {getattr(b, name)}") for name in ("step", "world_size")
             if getattr(a, name) != getattr(b, name)]
    if "model" not in ignore:
        found += _tensors("model", paths, a.model, b.model) + _table("model", "aliases", a.aliases, b.aliases)
    if "optimizer" not in ignore:
        found += _optimizers(paths, a, b)
    for name in ("scheduler", "loader", "extra"):
        found += _table(name, "", getattr(a, name), getattr(b, name))
    if a.world_size == b.world_size and "random_state" not in ignore:
        found += _random_states(paths, (a.step, b.step), a.world_size)
    return [difference for difference in found if difference.section not in ignore]


def _optimizers(paths: tuple[Path, Path], a: Manifest, b: Manifest) -> list[Difference]:
    if a.optimizer is None or b.optimizer is None:
        return [] if a.optimizer is b.optimizer else [Difference("optimizer", "", f"only in the {'second' if b.optimizer else 'first'}")]
    found = [] if a.optimizer.kind == b.optimizer.kind else [Difference("optimizer", "", f"{a.optimizer.kind} and {b.optimizer.kind}")]
    groups = a.optimizer.groups, b.optimizer.groups
    if len(groups[0]) != len(groups[1]):
        found.append(Difference("optimizer", "groups", f"{len(groups[0])} and {len(groups[1])}"))
    for index, (mine, theirs) in enumerate(zip(*groups, strict=False)):
        found += _table("optimizer", f"group {index}, parameters", mine["parameters"], theirs["parameters"])
        for option in sorted(mine["options"].keys() | theirs["options"].keys()):
            found += _table("optimizer", f"group {index}, {option}", mine["options"].get(option), theirs["options"].get(option))
    found += _table("optimizer", "values", a.optimizer.values, b.optimizer.values)
    return found + _tensors("optimizer", paths, a.optimizer.tensors, b.optimizer.tensors)


def _table(section: str, name: str, a: object, b: object) -> list[Difference]:
    """Values that JSON carries; told in full when short."""
    texts = ["nothing" if value is None else dump(value) for value in (a, b)]
    if texts[0] == texts[1]:
        return []
    return [Difference(section, name, " and ".join(text if len(text) <= 200 else text[:200] + "..." for text in texts))]


def _random_states(paths: tuple[Path, Path], steps: tuple[int, int], world_size: int) -> list[Difference]:
    """By rank; the files hold step and rank as well, so their states are compared and not their bytes."""
    found = []
    for rank in range(world_size):
        states = []
        for path, step in zip(paths, steps, strict=True):
            state = random_state.read(path / layout.random_name(rank), step, rank)
            states.append({name: state[name] for name in ("python", "numpy", "torch", "cuda")})
        names = ", ".join(name for name in states[0] if states[0][name] != states[1][name])
        found += [Difference("random_state", f"of rank {rank}", f"{names} differ")] if names else []
    return found


def _tensors(section: str, paths: tuple[Path, Path], a: dict[str, TensorEntry], b: dict[str, TensorEntry]) -> list[Difference]:
    """The tensors of a section, by name."""
    readers = TensorReader(paths[0], a), TensorReader(paths[1], b)
    found = []
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            found.append(Difference(section, name, f"only in the {'first' if name in a else 'second'}"))
        elif a[name].shape != b[name].shape:
            found.append(Difference(section, name, f"shape {list(a[name].shape)} and {list(b[name].shape)}"))
        elif a[name].dtype != b[name].dtype:
            found.append(Difference(section, name, f"type {a[name].dtype} and {b[name].dtype}"))
        elif difference := _values(section, name, readers):
            found.append(difference)
    return found


def _values(section: str, name: str, readers: tuple[TensorReader, TensorReader]) -> Difference | None:
    """The elements of two tensors of one shape and type."""
    count, largest, first, total = 0, 0.0, None, readers[0].entries[name].elements
    for (box, mine), (_, theirs) in zip(readers[0].blocks(name), readers[1].blocks(name), strict=True):
        differs = (as_bytes(mine) != as_bytes(theirs)).any(dim=1)
        if not bool(differs.any()):
            continue
        count += int(differs.sum())
        if first is None:
            place = int(differs.nonzero()[0])
            inside = torch.unravel_index(torch.tensor(place), mine.shape) if mine.dim() else ()
            first = tuple(offset + int(index) for offset, index in zip(box.offsets, inside, strict=True))
        largest = _largest(largest, mine.reshape(-1)[differs], theirs.reshape(-1)[differs])
    if first is None:
        return None
    at = f", first at {list(first)}" if first else ""
    size = "not a number" if largest is None else f"{largest:g}"
    return Difference(section, name, f"{count} of {total} elements differ, by at most {size}{at}", count, total, largest, first)


def _largest(before: float | None, mine: torch.Tensor, theirs: torch.Tensor) -> float | None:
    """The larger of `before` and the largest absolute difference; None once that is not a number."""
    if before is None:
        return None
    wide = torch.complex128 if mine.is_complex() else torch.float64
    largest = float((mine.to(wide) - theirs.to(wide)).abs().max())
    return max(before, largest) if largest == largest else None
