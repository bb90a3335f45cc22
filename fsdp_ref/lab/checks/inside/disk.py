"""A small disk that ranks share, for the harness of `sharded_save`: real files, every operation in a log, and a kill at any of them.

[Note: killed] A rank that is killed raises `Killed` out of the operation: before it, or when half of a file is written. Its process lives
on to answer the others, whose next barrier raises `PeerGone`; so a hundred kills cost a second and no process.

[Note: who knows what] Each line of a log says how many barriers its rank had passed. What happened on one rank before its barrier number k
is known on every rank that has passed k barriers; nothing else is known of another rank, whatever the clocks say.
"""

import hashlib
import os
import shutil
from pathlib import Path

import torch
from safetensors.numpy import load, save  # safetensors.torch reads memory by address, which a rank may not


class Killed(BaseException):
    """This rank is dead from here on."""


class PeerGone(RuntimeError):
    """Another rank died, or returned, while this one waited in a barrier."""


class Disk:
    """One rank's view of the disk. Paths are relative to its root, with / between the parts."""

    def __init__(self, root, wire, kill_at=None, half=False):
        self.root, self.wire, self.kill_at, self.half = Path(root), wire, kill_at, half
        self.log, self.barriers, self.operations, self.stuck = [], 0, 0, False

    def mkdir(self, path):
        """Make a folder. Raises FileExistsError when it is there."""
        self._enter("mkdir", path)
        self._told(os.mkdir, path)

    def write(self, path, tensors):
        """Write one safetensors file; a kill may leave half of it."""
        data = file_of(tensors)
        halved = self._enter("write", path, payload=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))
        self._told(lambda real: real.write_bytes(data[: len(data) // 2] if halved else data), path)
        if halved:
            raise Killed

    def sync(self, path):
        """Return when the file or folder is on the disk itself, safe from a power cut."""
        self._enter("sync", path)
        if not self.exists(path):
            raise FileNotFoundError(f"there is no {path} to sync")

    def rename(self, old, new):
        """Give a file or folder another name, in one step that happens or does not."""
        self._enter("rename", old, to=new)
        self._told(lambda real: os.rename(real, self._real(new)), old)

    def remove(self, path):
        """Delete a file, or a folder with everything in it."""
        self._enter("remove", path)
        self._told(lambda real: shutil.rmtree(real) if real.is_dir() else real.unlink(), path)

    def exists(self, path):
        """Whether there is such a file or folder."""
        return self._real(path).exists()

    def list(self, path="."):
        """Names of what is in a folder, sorted."""
        return sorted(os.listdir(self._real(path)))

    def barrier(self):
        """Return when every rank has come here."""
        done, dead = vote(self.wire, 0, 0)
        self.log.append({"what": "barrier", "path": "", "to": "", "payload": 0, "barriers": self.barriers})
        self.barriers += 1
        if done or dead:
            self.stuck = not dead
            raise PeerGone("another rank will never come to this barrier")

    def _enter(self, what, path, payload=0, to=""):
        """Write an operation down; dies here if it is the one. True: half of it is to be done."""
        mine, self.operations = self.operations, self.operations + 1
        half = self.half and what == "write"
        if mine == self.kill_at and not half:
            raise Killed
        self.log.append({"what": what, "path": os.path.normpath(path), "to": os.path.normpath(to) if to else "", "payload": payload,
                         "barriers": self.barriers})
        return mine == self.kill_at

    def _told(self, action, path):
        """Do it; an error names the path as the learner wrote it."""
        try:
            action(self._real(path))
        except OSError as error:
            raise type(error)(f"{error.strerror} ({path})") from None

    def _real(self, path):
        real = Path(os.path.normpath(self.root / str(path)))
        if not real.is_relative_to(self.root):
            raise ValueError(f"{path!r} leads out of the disk; give a path below its root, such as 'step-00000007'")
        return real


def vote(wire, done, dead):
    """How many ranks are done with their call, and how many of them dead."""
    votes = torch.tensor([done, dead])
    wire.all_reduce(votes)
    return votes.tolist()


def call(function, disk, *args):
    """One call on this rank, until every rank is done with it; how it ended here."""
    ended, dead = {"how": "returned", "error": ""}, 0
    try:
        function(disk, *args, disk.barrier)
    except Killed:
        ended["how"], dead = "killed", 1
    except PeerGone:
        ended["how"], dead = ("stuck", 0) if disk.stuck else ("left alone", 1)
    except NotImplementedError:
        raise
    except Exception as error:
        ended["how"], ended["error"], dead = "raised", f"{type(error).__name__}: {error}", 1
    while vote(disk.wire, 1, dead)[0] < disk.wire.world:
        pass
    return {**ended, "barriers": disk.barriers}


def contents(root):
    """Every folder at the root that is named like a checkpoint, with what its files hold: a digest, or "unreadable"."""
    found = {}
    for name in sorted(os.listdir(root)):
        if name.startswith("step-") and name[5:].isdigit() and os.path.isdir(os.path.join(root, name)):
            found[name] = {file: _read(Path(root, name, file)) for file in sorted(os.listdir(os.path.join(root, name)))}
    return found


def file_of(tensors):
    """The bytes of a safetensors file."""
    return save({name: tensor.detach().contiguous().numpy() for name, tensor in tensors.items()})


def _read(file):
    try:
        return digest({name: torch.tensor(array) for name, array in load(file.read_bytes()).items()})
    except Exception:
        return "unreadable"


def digest(tensors):
    """One word for the names and numbers of some tensors."""
    sums = hashlib.sha256()
    for name in sorted(tensors):
        sums.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode() + tensors[name].contiguous().numpy().tobytes())
    return sums.hexdigest()
