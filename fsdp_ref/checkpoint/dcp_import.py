"""One of our checkpoints from a directory of torch's distributed checkpoint (DCP), ready for `load` on any number of ranks.

The directory is not trusted (see dcp_directory). What DCP does not hold is not invented: there is no random state of the saving ranks,
so the checkpoint gets that of this process, and the class of the optimizer must be said unless `to_dcp` noted it.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import CheckpointError
from . import files, layout, random_state, safetensors_file
from .commit import shard_metadata
from .dcp_directory import DcpDirectory
from .dcp_export import SECTIONS
from .fit import some
from .jsontext import encode, parse
from .layout import Box
from .manifest import Manifest, OptimizerEntry, Piece, TensorEntry, state_name
from .publish import new_directory


def from_dcp(dcp_dir: str | os.PathLike, root: str | os.PathLike, *, step: int | None = None, model: str = "model",
             optimizer: str = "optim", optimizer_class: str | None = None) -> Path:
    """Write `root/step-<step>` from a DCP directory; returns it. No process group is needed.

    Args:
        dcp_dir: what `dcp.save({"model": get_model_state_dict(...), "optim": get_optimizer_state_dict(...)}, ...)` wrote, or `to_dcp`.
        root: a directory of checkpoints; made if missing.
        step: number of finished steps; by default what the directory has as `step`.
        model, optimizer: the keys under which model and optimizer lie in the saved state.
        optimizer_class: "AdamW", say; needed when there is an optimizer that `to_dcp` did not write.

    DCP stores a tied weight once a name; here it stays one tensor a name, unless `to_dcp` wrote the directory. Memory: the largest tensor
    and one of its chunks.

    Raises:
        CheckpointError: the directory is damaged, hostile or holds what has no place here; or the step exists already.
    """
    source = _Source(DcpDirectory(Path(dcp_dir)), model, optimizer)
    manifest = source.manifest(step, optimizer_class)
    target = Path(root) / layout.step_name(manifest.step)
    with new_directory(target) as directory:
        source.write(directory, manifest)
        manifest.check(target / layout.MANIFEST)
        with files.Writer(directory / layout.MANIFEST) as out:
            out.write(manifest.to_bytes())
    return target


class _Source:
    """A DCP directory whose entries are sorted into ours."""

    def __init__(self, dcp: DcpDirectory, model: str, optimizer: str) -> None:
        self.dcp, self.model, self.optimizer = dcp, model, optimizer
        self.paths: dict[str, dict[str, tuple]] = {"model": {}, "optimizer": {}}       # kind of file -> name in it -> path
        self.owners: dict[str, tuple[str, str]] = {}                                   # optimizer tensor -> (parameter, key)
        self.state_values: dict[str, dict] = {}
        self.groups: dict[int, dict] = {}
        self.others: dict[str, object] = {}
        for path in sorted(dcp.tensors, key=str):
            self.take_tensor(path)
        for path in sorted(dcp.values, key=str):
            self.take_value(path)

    def take_tensor(self, path: tuple) -> None:
        if path[0] == self.model and len(path) == 2:
            self.paths["model"][path[1]] = path
        elif path[:2] == (self.optimizer, "state") and len(path) == 4:
            name = state_name(path[2], path[3])
            self.paths["optimizer"][name], self.owners[name] = path, (path[2], path[3])
        elif path[:2] == (self.optimizer, "param_groups") and len(path) == 4:
            self.groups.setdefault(path[2], {})[path[3]] = self.dcp.tensor(path)
        else:
            raise self.misplaced(path)

    def take_value(self, path: tuple) -> None:
        if path[:2] == (self.optimizer, "state") and len(path) == 4:
            self.state_values.setdefault(path[2], {})[path[3]] = self.dcp.value(path)
        elif path[:2] == (self.optimizer, "param_groups") and len(path) == 4:
            self.groups.setdefault(path[2], {})[path[3]] = self.dcp.value(path)
        elif path in (("step",), ("fsdp_ref",)):
            self.others[path[0]] = self.dcp.value(path)
        else:
            raise self.misplaced(path)

    def misplaced(self, path: tuple) -> CheckpointError:
        return CheckpointError(f"{self.dcp.directory} holds {'.'.join(map(str, path))[:200]}, which is neither {self.model}.NAME nor "
                               f"{self.optimizer}.state.NAME.KEY nor {self.optimizer}.param_groups.INDEX.OPTION; say model= and optimizer= "
                               "as it was saved")

    def manifest(self, step: int | None, optimizer_class: str | None) -> Manifest:
        """The manifest, but for files and digests."""
        step = self.others.get("step") if step is None else step
        if type(step) is not int or not 0 <= step < 10**18:
            raise CheckpointError(f"the step of {self.dcp.directory} is {step!r}; give step=, a whole number from 0")
        noted = parse(str(self.others.get("fsdp_ref", "{}")).encode(), f"the entry fsdp_ref of {self.dcp.directory}")
        if not isinstance(noted, dict):
            raise CheckpointError(f"the entry fsdp_ref of {self.dcp.directory} is no table; it is damaged")
        aliases = self.take_aliases(noted.get("aliases", {}))
        optimizer = None
        if self.groups:
            optimizer = self.optimizer_entry(noted.get("optimizer_class") if optimizer_class is None else optimizer_class)
        elif self.owners or self.state_values:
            raise CheckpointError(f"{self.dcp.directory} has optimizer state and no param_groups; save what get_optimizer_state_dict gives")
        return Manifest(step, 1, self.entries("model"), aliases, optimizer, *(noted.get(section) for section in SECTIONS))

    def take_aliases(self, noted: object) -> dict[str, str]:
        """The tied names that `to_dcp` noted; the copies stored under them are left out."""
        names = self.paths["model"]
        if not isinstance(noted, dict) or not all(alias in names and target in names for alias, target in noted.items()):
            raise CheckpointError(f"the tied names noted in {self.dcp.directory} are not those of its tensors; it is damaged")
        for alias in noted:
            del names[alias]
        return dict(noted)

    def entries(self, kind: str) -> dict[str, TensorEntry]:
        """The tensors of a kind of file, each in one piece."""
        file = layout.shard_name(kind, 0, 1)
        entries = {}
        for name, path in self.paths[kind].items():
            stored, owner = self.dcp.tensors[path], self.owners.get(name, ("", "")) if kind == "optimizer" else ("", "")
            entries[name] = TensorEntry(stored.dtype, stored.shape, (Piece(file, Box.whole(stored.shape)),), *owner)
        return entries

    def optimizer_entry(self, kind: str | None) -> OptimizerEntry:
        """Groups, tensors and values of the optimizer."""
        if type(kind) is not str:
            raise CheckpointError(f"{self.dcp.directory} does not say which optimizer it is of; give optimizer_class=, \"AdamW\" say")
        groups = []
        for index in range(len(self.groups)):
            group = dict(self.groups.get(index, {}))
            names = group.pop("params", None)
            if not isinstance(names, list) or not set(names) <= self.paths["model"].keys():
                raise CheckpointError(f"parameter group {index} of {self.dcp.directory} does not list names of its model's parameters "
                                      f"({some([str(name) for name in names or []])})")
            groups.append({"parameters": names, "options": encode(group, f"group {index} of the optimizer")})
        values = {name: encode(value, f"the state of {name}") for name, value in self.state_values.items()}
        return OptimizerEntry(kind, groups, self.entries("optimizer"), values)

    def write(self, directory: Path, manifest: Manifest) -> None:
        """The files beside the manifest, whose sizes and digests go into it."""
        for kind, entries in manifest.sections().items():
            name = layout.shard_name(kind, 0, 1)
            mine = {label: (entry, Box.whole(entry.shape)) for label, entry in entries.items()}
            kinds = {label: (entry.dtype, entry.shape) for label, entry in entries.items()}
            pieces = lambda label, kind=kind: safetensors_file.byte_pieces(self.dcp.tensor(self.paths[kind][label]))  # noqa: E731
            written = safetensors_file.write_pieces(directory / name, kinds, shard_metadata(mine, manifest.step, 0, 1), pieces)
            manifest.files[name] = (written.bytes, written.digest)
            for label, entry in entries.items():
                piece = Piece(name, Box.whole(entry.shape), written.tensors[label])
                entries[label] = TensorEntry(entry.dtype, entry.shape, (piece,), entry.parameter, entry.key)
        name = layout.random_name(0)
        with files.Writer(directory / name) as out:
            out.write(random_state.capture(manifest.step, 0, world_size=1))
        manifest.files[name] = (out.bytes, out.digest)
