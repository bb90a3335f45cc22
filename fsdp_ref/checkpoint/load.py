"""Load a checkpoint into a model, an optimizer and their companions, on any number of ranks.

    1  find       rank 0 lists the candidates                                    vote
    2  verify     the ranks share out the files and read every byte              vote; a damaged one: the one before
    3  fit        names, shapes, types, groups against the targets               vote; up to here nothing is changed
    4  restore    scheduler and loader, tensors, group options, random state     vote

Missing and unexpected names are errors. Random state comes last, so nothing that happens here can draw from it.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..errors import CheckpointError
from . import background, fit, layout, random_state, reading, retention, votes
from .jsontext import decode
from .manifest import Manifest
from .verify import examine


@dataclass(frozen=True)
class LoadReport:
    """What was loaded.

    Attributes:
        step: number of finished steps.
        path: the checkpoint's directory.
        extra: what was given to `save` as `extra`.
        counts: number of items loaded by section: model, optimizer (tensors), groups, bytes (read by this rank).
        saved_world_size, world_size: ranks that saved and ranks that loaded.
        random_state: "exact" (as saved) or "derived" (new seeds made from the saved state, because the world has another size).
        skipped: sections that the checkpoint has and nobody asked for.
        refused: newer checkpoints that were damaged: (name, reason).
    """

    step: int
    path: Path
    extra: object
    counts: dict[str, int]
    saved_world_size: int
    world_size: int
    random_state: str
    skipped: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def resharded(self) -> bool:
        """True when another number of ranks saved it."""
        return self.saved_world_size != self.world_size


def load(root_or_step_dir: str | os.PathLike, *, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None,
         scheduler: object | None = None, loader: object | None = None, step: int | None = None) -> LoadReport:
    """Load the newest undamaged checkpoint under a directory, or a given one; a collective of all ranks.

    Args:
        root_or_step_dir: a directory of checkpoints, or one checkpoint (then a damaged one is an error).
        model, optimizer, scheduler, loader: what to fill; what is not given stays as it is.
        step: load this step and no other.

    Raises:
        CheckpointError: nothing there, everything damaged, or it does not fit; the same message on every rank. Up to the moment
            when everything has been checked no target is changed.
        RankError: a rank died.
    """
    return _Load(model, optimizer, scheduler, loader).run(Path(root_or_step_dir), step)


@dataclass
class _Load:
    """One load on one rank."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None
    scheduler: object | None
    loader: object | None
    refused: list[tuple[str, str]] = field(default_factory=list)
    manifest: Manifest | None = None

    def run(self, place: Path, step: int | None) -> LoadReport:
        """The four stages; see the module's docstring."""
        background.finish()                                  # retention of a save that runs could delete what is read here
        names, base, exact = votes.agree(f"look for a checkpoint in {place}", lambda: self.find(place, step))[0]
        path = self.choose([Path(base) / name for name in names], exact)
        what = f"load {path}"
        votes.agree(what, self.check_fit)
        undo = self.remember()
        try:
            votes.agree(what, self.restore_companions)
        except CheckpointError:
            undo()
            raise
        counts: dict[str, int] = {}
        votes.agree(f"finish loading {path} (what is in memory is now a mixture, load again before you train on)",
                    lambda: self.restore_tensors(path, counts))                      # everything was checked: only a failing disk ends here
        exactly = votes.agree(f"restore the random state of {path}", lambda: self.restore_random(path))
        retention.protect(path)
        return LoadReport(self.manifest.step, path, decode(self.manifest.extra), counts, self.manifest.world_size, votes.world_size(),
                          "exact" if all(exactly) else "derived", self.skipped(), tuple(self.refused))

    def find(self, place: Path, step: int | None) -> tuple[list[str], str, bool] | None:
        """Stage 1, rank 0: names of the candidates (newest first), the directory they are in, and whether only one will do."""
        if votes.rank() != 0:
            return None
        place = place.absolute()
        is_step = layout.step_of(place.name) is not None and not retention.committed(place)
        if is_step or (place / layout.MANIFEST).is_file():
            if step is not None and layout.step_of(place.name) not in (None, step):
                raise CheckpointError(f"{place} is not step {step}; give the directory above it or leave step= out")
            if not place.is_dir():
                raise CheckpointError(f"there is no checkpoint {place}; give a directory that save made")
            return [place.name], str(place.parent), True
        found = [path.name for path in reversed(retention.committed(place))]
        if not found:
            raise CheckpointError(f"there is no checkpoint in {place}; give a directory that save wrote to")
        if step is None:
            return found, str(place), False
        if layout.step_name(step) not in found:
            raise CheckpointError(f"there is no checkpoint of step {step} in {place}; it has {', '.join(reversed(found))}")
        return [layout.step_name(step)], str(place), True

    def choose(self, candidates: list[Path], exact: bool) -> Path:
        """Stage 2: the first candidate that every rank finds whole. The damaged ones before it are named in a warning."""
        for path in candidates:
            failure = votes.describe_failure(votes.poll(lambda path=path: self.examine(path)))
            if failure is None:
                return path
            if exact:
                raise CheckpointError(failure[1])
            self.refused.append((path.name, failure[1]))
            warnings.warn(f"passing over the damaged checkpoint {path.name}: {failure[1]}", stacklevel=4)
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refused[:3])
        raise CheckpointError(f"none of the {len(candidates)} checkpoints in {candidates[0].parent} is whole ({reasons})")

    def examine(self, path: Path) -> None:
        self.manifest = examine(path, votes.rank(), votes.world_size())

    def check_fit(self) -> None:
        """Stage 3: plan everything; the plan holds what stage 4 needs."""
        self.plan = fit.Plan.make(self.manifest, self.model, self.optimizer)
        for name in ("scheduler", "loader"):
            if getattr(self, name) is not None and getattr(self.manifest, name) is None:
                raise CheckpointError(f"the checkpoint has no {name} state; save it with {name}=, or load without it")

    def remember(self):
        """A function that puts scheduler and loader back as they are now."""
        companions = [(holder, holder.state_dict()) for holder in (self.scheduler, self.loader) if holder is not None]

        def undo() -> None:
            for holder, state in companions:
                holder.load_state_dict(state)
        return undo

    def restore_companions(self) -> None:
        """Stage 4a: these may refuse what they are given, so they come before the tensors."""
        for name in ("scheduler", "loader"):
            holder = getattr(self, name)
            if holder is not None:
                try:
                    holder.load_state_dict(decode(getattr(self.manifest, name)))
                except Exception as error:
                    raise CheckpointError(f"the {name} refused its state ({type(error).__name__}: {error}); "
                                          f"build it as in the run that saved the checkpoint") from error

    def restore_tensors(self, path: Path, counts: dict[str, int]) -> None:
        """Stage 4b: the bytes, then the optimizer's values and options (after the scheduler, which may have set a learning rate)."""
        nbytes = reading.fill(path, self.plan.model_jobs())
        counts["model"] = len(self.manifest.model)
        if self.optimizer is not None:
            nbytes += self.plan.fill_optimizer(path)
            counts["optimizer"] = len(self.manifest.optimizer.tensors)
            counts["groups"] = len(self.manifest.optimizer.groups)
        counts["bytes"] = nbytes

    def restore_random(self, path: Path) -> bool:
        """Stage 4c: exact in a world of the same size, else derived."""
        rank, size, saved = votes.rank(), votes.world_size(), self.manifest.world_size
        state = random_state.read(path / layout.random_name(rank % saved), self.manifest.step, rank % saved)
        if size == saved:
            return random_state.restore(state)
        random_state.derive(state, rank, size)
        return False

    def skipped(self) -> tuple[str, ...]:
        return tuple(name for name in ("optimizer", "scheduler", "loader")
                     if getattr(self, name) is None and getattr(self.manifest, name) is not None)
