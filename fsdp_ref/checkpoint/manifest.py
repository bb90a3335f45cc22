"""The manifest: one JSON file that says what a checkpoint holds and where, written by rank 0 after every rank's vote.

It is the only index. Each tensor has its global shape, its type and its pieces (file, offsets, sizes), each file its size and
digest, and the manifest its own digest in its last line, so a single changed bit anywhere is noticed. Reading it checks all that
can be known without opening another file. Nothing in it is trusted as a path: file names must equal the ones that the world size
gives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..errors import CheckpointError
from . import files, layout
from .jsontext import decode, dump, parse
from .layout import Box
from .safetensors_file import DTYPES

FORMAT = "fsdp_ref checkpoint"
VERSION = 2
LIMIT = 256 << 20        # bytes of a manifest; a thousand times what a large model needs


@dataclass(frozen=True)
class Piece:
    """A part of a tensor and the file it lies in, under the tensor's name.

    `digest` is that of its bytes. The file's digest decides whether a file is whole; this one tells which tensor is damaged.
    """

    file: str
    box: Box
    digest: str = ""


@dataclass(frozen=True)
class TensorEntry:
    """A saved tensor: type (safetensors' name), global shape and pieces. Optimizer tensors also name parameter and state key."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    parameter: str = ""
    key: str = ""

    def to_json(self) -> dict:
        owner = {"parameter": self.parameter, "key": self.key} if self.parameter else {}
        chunks = [{"file": p.file, "offsets": list(p.box.offsets), "sizes": list(p.box.sizes), "digest": p.digest} for p in self.pieces]
        return {**owner, "dtype": self.dtype, "shape": list(self.shape), "chunks": chunks}

    @property
    def elements(self) -> int:
        return Box.whole(self.shape).volume

    @property
    def bytes(self) -> int:
        return self.elements * DTYPES[self.dtype].itemsize


@dataclass
class OptimizerEntry:
    """The optimizer: class name, groups (`{"parameters": [names], "options": {...}}`), tensors by file name, other state values."""

    kind: str
    groups: list[dict]
    tensors: dict[str, TensorEntry]
    values: dict[str, dict]

    def to_json(self) -> dict:
        tensors = {name: self.tensors[name].to_json() for name in sorted(self.tensors)}
        return {"class": self.kind, "groups": self.groups, "tensors": tensors, "values": self.values}


@dataclass
class Manifest:
    """Everything but the bytes. `scheduler`, `loader` and `extra` are in the form of `jsontext.encode`; None: not saved."""

    step: int
    world_size: int
    model: dict[str, TensorEntry]
    aliases: dict[str, str]
    optimizer: OptimizerEntry | None = None
    scheduler: object = None
    loader: object = None
    extra: object = None
    files: dict[str, tuple[int, str]] = field(default_factory=dict)

    def sections(self) -> dict[str, dict[str, TensorEntry]]:
        """The tensors of each kind of file."""
        return {"model": self.model, **({"optimizer": self.optimizer.tensors} if self.optimizer else {})}

    def to_bytes(self) -> bytes:
        """The file's bytes; the same manifest always gives the same."""
        value = {
            "format": FORMAT, "format_version": VERSION, "step": self.step, "world_size": self.world_size,
            "scheduler": self.scheduler, "loader": self.loader, "extra": self.extra,
            "files": {name: {"bytes": size, "digest": digest} for name, (size, digest) in sorted(self.files.items())},
            "aliases": dict(sorted(self.aliases.items())),
            "model": {name: self.model[name].to_json() for name in sorted(self.model)},
            "optimizer": self.optimizer.to_json() if self.optimizer else None,
        }
        return seal(value)

    @staticmethod
    def read(directory: Path) -> Manifest:
        """The manifest of a step directory, with every check that needs no other file.

        Raises:
            CheckpointError: missing, damaged, or of another format version.
        """
        path = directory / layout.MANIFEST
        try:
            data = files.read_small(path, LIMIT)
        except FileNotFoundError as error:
            raise CheckpointError(f"{directory} has no {layout.MANIFEST}, so it is no complete checkpoint; give a directory that save "
                                  "made") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}); restore the checkpoint from a copy") from error
        value = parse(data, str(path))
        try:
            manifest = _from_json(unseal(value, data), path)
            manifest.check(path)
            return manifest
        except CheckpointError as error:
            raise CheckpointError(f"in {path}: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {str(error)[:200]}); restore the checkpoint from a "
                                  "copy") from error

    def check(self, path: Path) -> None:
        """Everything that must hold between the parts. Raises CheckpointError."""
        if len(self.files) != self.world_size * (3 if self.optimizer else 2) or \
                self.files.keys() != layout.file_names(self.world_size, self.optimizer is not None):
            raise CheckpointError(f"the list of files is not that of {self.world_size} ranks; restore the checkpoint from a copy")
        step = layout.step_of(path.parent.name)
        if step is not None and step != self.step:
            raise CheckpointError(f"the directory is called {path.parent.name} and holds step {self.step}; give it its own name back")
        for kind, tensors in self.sections().items():
            allowed = {layout.shard_name(kind, rank, self.world_size) for rank in range(self.world_size)}
            for name, entry in tensors.items():
                if len({piece.file for piece in entry.pieces}) != len(entry.pieces) or not allowed >= {p.file for p in entry.pieces}:
                    raise CheckpointError(f"the pieces of {name} lie in files where they cannot be; restore the checkpoint from a copy")
                layout.check_cover(name, entry.shape, [piece.box for piece in entry.pieces])
        for alias, name in self.aliases.items():
            if alias in self.model or name not in self.model:
                raise CheckpointError(f"{alias} is said to share {name}, which cannot be; restore the checkpoint from a copy")
        if self.optimizer:
            self._check_optimizer(self.optimizer)

    def _check_optimizer(self, optimizer: OptimizerEntry) -> None:
        listed = [name for group in optimizer.groups for name in group["parameters"]]
        owners = {entry.parameter for entry in optimizer.tensors.values()} | optimizer.values.keys()
        if len(set(listed)) != len(listed) or not owners <= set(listed) <= self.model.keys():
            raise CheckpointError("the optimizer's groups and state name parameters twice or that do not exist; restore the checkpoint "
                                  "from a copy")
        for name, entry in optimizer.tensors.items():
            if state_name(entry.parameter, entry.key) != name:
                raise CheckpointError(f"the optimizer tensor {name} is not called after its parameter and key; restore the checkpoint from "
                                      "a copy")


def state_name(parameter: str, key: str) -> str:
    """`layers.0.weight.exp_avg`. The text behind the last point is the key: a point inside a key is written `%2E`."""
    return f"{parameter}.{key.replace('%', '%25').replace('.', '%2E')}"


def seal(value: dict) -> bytes:
    """JSON text whose last entry is the digest of the rest."""
    text = dump(value)
    digest = files.digest_bytes(text.encode())
    if text.endswith("\n}"):                                # already one entry a line: the last one is added without writing all anew
        return f'{text[:-2]},\n  "digest": "{digest}"\n}}\n'.encode()
    return (dump({**value, "digest": digest}) + "\n").encode()


def unseal(value: object, data: bytes) -> dict:
    """What `seal` was given, if not a byte was changed since. Raises CheckpointError otherwise."""
    rest = {name: item for name, item in value.items() if name != "digest"} if isinstance(value, dict) else {}
    if not isinstance(value, dict) or seal(rest) != data:
        raise CheckpointError("the text does not match its own digest, it was changed after it was written; restore it from a copy")
    return rest


def _from_json(value: dict, path: Path) -> Manifest:
    """The manifest in `value`. Raises KeyError, TypeError or ValueError where something is of the wrong kind."""
    if value["format"] != FORMAT or _natural(value["format_version"]) != VERSION:
        raise CheckpointError(f"the format is {value['format']!r} version {value['format_version']!r} and this package reads {FORMAT!r} "
                              f"version {VERSION}; use the version of fsdp_ref that wrote it")
    expected = {"format", "format_version", "step", "world_size", "scheduler", "loader", "extra", "files", "aliases", "model", "optimizer"}
    _fields(value, expected, "the manifest")
    sizes = {name: (_natural(facts["bytes"]), _text(facts["digest"])) for name, facts in value["files"].items()}
    model = {name: _tensor(entry, owned=False) for name, entry in value["model"].items()}
    aliases = {alias: _text(name) for alias, name in value["aliases"].items()}
    for kind in ("scheduler", "loader", "extra"):
        decode(value[kind])
    optimizer = None if value["optimizer"] is None else _optimizer(value["optimizer"])
    world_size = _natural(value["world_size"])
    return Manifest(_natural(value["step"]), world_size, model, aliases, optimizer, value["scheduler"], value["loader"], value["extra"],
                    sizes)


def _optimizer(value: dict) -> OptimizerEntry:
    _fields(value, {"class", "groups", "tensors", "values"}, "the optimizer")
    for group in value["groups"]:
        _fields(group, {"parameters", "options"}, "a group")
        for name in group["parameters"]:
            _text(name)
        if not isinstance(decode(group["options"]), dict):
            raise TypeError("the options of a group are no table")
    for values in value["values"].values():
        if not isinstance(decode(values), dict):
            raise TypeError("the state values of a parameter are no table")
    tensors = {name: _tensor(entry, owned=True) for name, entry in value["tensors"].items()}
    return OptimizerEntry(_text(value["class"]), value["groups"], tensors, value["values"])


def _tensor(value: dict, owned: bool) -> TensorEntry:
    _fields(value, {"dtype", "shape", "chunks"} | ({"parameter", "key"} if owned else set()), "a tensor")
    if value["dtype"] not in DTYPES:
        raise ValueError(f"the type {str(value['dtype'])[:40]!r} is unknown")
    pieces = []
    for chunk in value["chunks"]:
        _fields(chunk, {"file", "offsets", "sizes", "digest"}, "a chunk")
        pieces.append(Piece(_text(chunk["file"]), Box(_naturals(chunk["offsets"]), _naturals(chunk["sizes"])), _text(chunk["digest"])))
    owner = (_text(value["parameter"]), _text(value["key"])) if owned else ("", "")
    return TensorEntry(value["dtype"], _naturals(value["shape"]), tuple(pieces), *owner)


def _fields(value: dict, names: set[str], what: str) -> None:
    if value.keys() != names:
        raise ValueError(f"{what} has the entries {sorted(value)[:20]} instead of {sorted(names)}")


def _natural(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{str(value)[:40]} is not a whole number from 0 to 2**63 - 1")
    return value


def _naturals(values: object) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise TypeError("a list of numbers is missing")
    return tuple(_natural(value) for value in values)


def _text(value: object) -> str:
    if type(value) is not str:
        raise TypeError(f"{str(value)[:40]} is not text")
    return value
