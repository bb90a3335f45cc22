"""Models, bits and file layers that the checkpoint tests share."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_ref.checkpoint import files
from fsdp_ref.engine import fully_shard


class Toy(nn.Module):
    """Odd sizes: 5 rows, 7 rows, 1 row (empty shards from 2 ranks on), a tied pair, a frozen and an unused parameter, buffers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        values = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        self.embed = nn.Parameter(values(5, 6))
        self.first = nn.Linear(6, 7)
        self.narrow = nn.Linear(7, 1)
        self.widen = nn.Linear(1, 6)
        self.head = nn.Linear(6, 5, bias=False)
        self.unused = nn.Parameter(values(3, 2))
        self.frozen = nn.Parameter(values(4), requires_grad=False)
        with torch.no_grad():
            for module in (self.first, self.narrow, self.widen):
                module.weight.copy_(values(*module.weight.shape))
                module.bias.copy_(values(*module.bias.shape))
        self.head.weight = self.embed
        self.dropout = nn.Dropout(0.25)
        self.register_buffer("scale", values(3))
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("scratch", values(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(torch.tanh(self.first(self.embed[tokens])))
        hidden = self.widen(torch.tanh(self.narrow(hidden))) + self.frozen.sum()
        return self.head(hidden)


def sharded(seed: int = 0) -> Toy:
    """The toy as the engine shards it."""
    model = Toy(seed)
    fully_shard(model)
    return model


def adamw(model: nn.Module, lr: float = 0.01) -> torch.optim.AdamW:
    """Two groups, so that names matter."""
    named = dict(model.named_parameters())
    biases = [p for name, p in named.items() if name.endswith("bias")]
    others = [p for name, p in named.items() if not name.endswith("bias") and p.requires_grad]
    return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": others}], lr=lr)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[bytes]:
    """Some steps on fixed tokens; the loss bits."""
    losses = []
    for step in range(first, first + steps):
        tokens = torch.tensor([step % 5, (step + 2) % 5, 4])
        loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(bits(loss))
    return losses


def bits(tensor: torch.Tensor) -> bytes:
    """Shape, type and bytes of a tensor; a DTensor is gathered by torch."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    raw = tensor.contiguous().cpu().reshape(-1)
    return f"{tuple(tensor.shape)} {tensor.dtype} ".encode() + (raw.view(torch.uint8).numpy().tobytes() if raw.numel() else b"")


def model_bits(model: nn.Module) -> dict[str, bytes]:
    """Everything in the state dict."""
    return {name: bits(tensor) for name, tensor in model.state_dict().items()}


def optimizer_bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Moments by parameter name, and the options of each parameter's group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    result: dict[str, object] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            result[f"{name} options"] = {key: value for key, value in sorted(group.items()) if key != "params"}
            for key, value in optimizer.state.get(parameter, {}).items():
                result[f"{name} {key}"] = bits(value) if isinstance(value, torch.Tensor) else value
    return result


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    return {"model": model_bits(model), "optimizer": optimizer_bits(model, optimizer)}


def draws() -> list:
    """What each generator draws next (which moves it on)."""
    return [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn()), bits(torch.rand(3)),
            bits(torch.randn(3))]


def random_states() -> tuple:
    """The generators' states, without moving them."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, keys.tobytes(), tuple(rest), torch.get_rng_state().numpy().tobytes()


class Schedule:
    """A scheduler or loader: numbers in a table."""

    def __init__(self, **state) -> None:
        self.state = state

    def state_dict(self) -> dict:
        return dict(self.state)

    def load_state_dict(self, state: dict) -> None:
        if state.get("refuse"):
            raise ValueError("this position does not exist")
        self.state = dict(state)


class Tripwire(files.Files):
    """Counts the operations that change the disk, and calls `act` in the place of number `at` (1 is the first)."""

    def __init__(self, at: int = 0, act=None, *, only: str = "") -> None:
        self.at, self.act, self.only, self.log = at, act, only, []

    def _step(self, name: str, path: object = "") -> None:
        if not self.only or name == self.only:
            self.log.append((name, Path(path).name if path else ""))
            if len(self.log) == self.at:
                self.act()

    def create(self, path):
        self._step("create", path)
        return super().create(path)

    def write_some(self, descriptor, data):
        self._step("write")
        return super().write_some(descriptor, data)

    def fsync(self, descriptor):
        self._step("fsync")
        super().fsync(descriptor)

    def fsync_dir(self, path):
        self._step("fsync_dir", path)
        super().fsync_dir(path)

    def mkdir(self, path):
        self._step("mkdir", path)
        super().mkdir(path)

    def rename(self, source, target):
        self._step("rename", target)
        super().rename(source, target)

    def replace(self, source, target):
        self._step("replace", target)
        super().replace(source, target)

    def unlink(self, path):
        self._step("unlink", path)
        super().unlink(path)

    def rmdir(self, path):
        self._step("rmdir", path)
        super().rmdir(path)


class Gate(files.Files):
    """Holds every save up at its first file, until `release` is set (or ten seconds are over)."""

    def __init__(self) -> None:
        self.release, self.reached = threading.Event(), threading.Event()

    def create(self, path):
        self.reached.set()
        assert self.release.wait(10), "nobody opened the gate"
        return super().create(path)


def contents(directory: Path) -> dict[str, bytes]:
    """Every file of a directory."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root))


@contextlib.contextmanager
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
