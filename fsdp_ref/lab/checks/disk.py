"""A small disk that ranks share, for the exercise `sharded_save`: real files, every operation in a log, and a kill at any of them.

[Note: killed] A rank that is killed raises `Killed` out of the operation: before it, or when half of a file is written. Its process lives
on to answer the others, whose next barrier raises `PeerGone`; so a hundred kills cost a second and no process.

[Note: who knows what] Each line of a log says how many barriers its rank had passed. What happened on one rank before its barrier number k is
known on every rank that has passed k barriers; nothing else is known of another rank, whatever the clocks say.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save


class Killed(BaseException):
    """This rank is dead from here on."""


class PeerGone(RuntimeError):
    """Another rank died, or returned, while this one waited in a barrier."""


class Disk:
    """One rank's view of the disk. Paths are relative to its root, with / between the parts."""

    def __init__(self, root: Path, kill_at: int | None = None, half: bool = False) -> None:
        self.root, self.kill_at, self.half = root, kill_at, half
        self.log: list[dict] = []
        self.barriers = 0
        self.stuck = False

    def mkdir(self, path: str) -> None:
        """Make a folder. Raises FileExistsError when it is there."""
        self._enter("mkdir", path)
        self._real(path).mkdir()

    def write(self, path: str, tensors: dict[str, torch.Tensor]) -> None:
        """Write one safetensors file; a kill may leave half of it."""
        data = save({name: tensor.detach().contiguous() for name, tensor in tensors.items()})
        halved = self._enter("write", path, len(data), sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))
        self._real(path).write_bytes(data[: len(data) // 2] if halved else data)
        if halved:
            raise Killed

    def sync(self, path: str) -> None:
        """Return when the file or folder is on the disk itself, safe from a power cut."""
        self._enter("sync", path)
        handle = os.open(self._real(path), os.O_RDONLY)
        os.close(handle)

    def rename(self, old: str, new: str) -> None:
        """Give a file or folder another name, in one step that happens or does not."""
        self._enter("rename", old, to=new)
        os.rename(self._real(old), self._real(new))

    def remove(self, path: str) -> None:
        """Delete a file, or a folder with everything in it."""
        self._enter("remove", path)
        real = self._real(path)
        shutil.rmtree(real) if real.is_dir() else real.unlink()

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder."""
        return self._real(path).exists()

    def list(self, path: str = ".") -> list[str]:
        """Names of what is in a folder, sorted."""
        return sorted(os.listdir(self._real(path)))

    def barrier(self) -> None:
        """Return when every rank has come here."""
        gone = _vote(0, 0)
        self.log.append({"what": "barrier", "path": "", "barriers": self.barriers})
        self.barriers += 1
        if any(gone):
            self.stuck = not gone[1]
            raise PeerGone("another rank will never come to this barrier")

    def _enter(self, what: str, path: str, size: int = 0, payload: int = 0, to: str = "") -> bool:
        """Write an operation down; dies here if it is the one. True: half of it is to be done."""
        number = sum(row["what"] != "barrier" for row in self.log)
        if number == self.kill_at and not (self.half and what == "write"):
            raise Killed
        self.log.append({"what": what, "path": _clean(path), "to": _clean(to) if to else "", "size": size, "payload": payload,
                         "barriers": self.barriers})
        return number == self.kill_at

    def _real(self, path: str) -> Path:
        real = (self.root / str(path)).resolve()
        if not real.is_relative_to(self.root.resolve()):
            raise ValueError(f"{path!r} leads out of the disk; give a path below its root, such as 'step-00000007'")
        return real


def _clean(path: str) -> str:
    return str(Path(str(path)))


def _vote(done: int, dead: int) -> tuple[int, int]:
    """How many ranks are done with their call, and how many of them dead."""
    votes = torch.tensor([done, dead])
    dist.all_reduce(votes)
    return int(votes[0]), int(votes[1])


def shared_folder() -> Path:
    """A new folder that all ranks know."""
    name = torch.zeros(256, dtype=torch.uint8)
    if dist.get_rank() == 0:
        text = tempfile.mkdtemp(prefix="fsdp-ref-disk-").encode()
        name[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    dist.broadcast(name, src=0)
    return Path(bytes(name[name > 0].tolist()).decode())


def call(student, disk: Disk, *args) -> dict:
    """One call on this rank, until every rank is done with it; how it ended here."""
    ended, dead = {"how": "returned", "error": "", "barriers": 0}, 0
    try:
        student(disk, *args, disk.barrier)
    except Killed:
        ended["how"], dead = "killed", 1
    except PeerGone:
        ended["how"], dead = "stuck" if disk.stuck else "left alone", 0 if disk.stuck else 1
    except Exception as error:
        ended["how"], ended["error"], dead = "raised", f"{type(error).__name__}: {error}", 1
    ended["barriers"] = disk.barriers
    while _vote(1, dead)[0] < dist.get_world_size():
        pass
    return ended


def contents(root: Path) -> dict[str, dict[str, str]]:
    """Every folder at the root that is named like a checkpoint, with what its files hold: a digest, or "unreadable"."""
    found = {}
    for folder in sorted(root.iterdir()):
        if folder.is_dir() and folder.name.startswith("step-") and folder.name[5:].isdigit():
            found[folder.name] = {file.name: _read(file) for file in sorted(folder.iterdir())}
    return found


def _read(file: Path) -> str:
    try:
        return digest(load_file(file))
    except Exception:
        return "unreadable"


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """One word for the names and numbers of some tensors."""
    sums = hashlib.sha256()
    for name in sorted(tensors):
        sums.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode() + tensors[name].contiguous().numpy().tobytes())
    return sums.hexdigest()
