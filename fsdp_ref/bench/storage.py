"""Who takes part in the benchmark of checkpoints, and what a rank measures: saving, loading, peak memory, and the stall of async_save.

Every contender saves and loads the same tensors in the same ranks: weights of one width and AdamW's two moments, sharded by
`fully_shard`, filled by chance. This module must never compare.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from .. import checkpoint, collectives
from ..checkpoint import files
from ..engine import fully_shard
from ..world import World
from . import memory, speed

SAVES = {"save": "fsdp_ref save", "dcp": "torch DCP, sync_files=True", "plain": "plain write + fsync of the same bytes"}
LOADS = {"load": "fsdp_ref load (every byte verified)", "load-unverified": "fsdp_ref load, verify=False", "dcp": "torch DCP",
         "plain": "plain read of the same bytes"}
STALLS = {"stall": "fsdp_ref async_save, until it returns", "copy": "copy of the state into memory that is there"}
TENSORS, WIDTH = 24, 1024           # weights, and elements of a row
WARM_UP = 1                         # rounds before the first that counts


class State:
    """A rank's share of `nbytes` of state, and what each contender does with it."""

    def __init__(self, here: World, nbytes: int) -> None:
        rows = max(1, round(nbytes / 3 / TENSORS / WIDTH / 4 / here.size)) * here.size
        self.rank = here.rank
        self.model = nn.ParameterList(torch.empty(rows, WIDTH) for _ in range(TENSORS))
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.dcp_state = {"model": dict(self.model.state_dict()), "optimizer": {}}
        generator = torch.Generator().manual_seed(here.rank)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
                self.dcp_state["optimizer"] |= {f"{name}.{key}": moment for key, moment in moments.items()}
            self.tensors = [tensor.to_local().detach() for section in self.dcp_state.values() for tensor in section.values()]
            for tensor in self.tensors:
                tensor.copy_(torch.rand(tensor.shape, generator=generator))
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def save(self, who: str, place: Path, step: int = 1) -> None:
        """Save into the new directory `place`; on this rank's return its part is on the drive."""
        if who == "save":
            checkpoint.save(place, step=step, model=self.model, optimizer=self.optimizer)
        elif who == "dcp":
            dcp.save(self.dcp_state, storage_writer=dcp.FileSystemWriter(place, sync_files=True))
        else:
            place.mkdir(exist_ok=True)
            with open(place / str(self.rank), "wb", buffering=0) as file:
                for tensor in self.tensors:
                    file.write(memoryview(tensor.view(torch.uint8).numpy()))
                os.fsync(file.fileno())

    def load(self, who: str, place: Path) -> None:
        """Load what `save` left in `place`, into the same tensors."""
        if who.startswith("load"):
            checkpoint.load(place, model=self.model, optimizer=self.optimizer, verify=who == "load")
        elif who == "dcp":
            dcp.load(self.dcp_state, storage_reader=dcp.FileSystemReader(place))
        else:
            with open(place / str(self.rank), "rb", buffering=0) as file:
                for tensor in self.tensors:
                    file.readinto(memoryview(tensor.view(torch.uint8).numpy()))

    def remove(self, place: Path) -> None:
        """Rank 0 deletes a directory; when this returns on any rank, the drive has nothing left to do about it."""
        if self.rank == 0:
            shutil.rmtree(place, ignore_errors=True)
            files.layer().fsync_dir(place.parent)
        collectives.barrier()


def take_turns(here: World, names: tuple[str, ...], rounds: int, work: Callable[[str, int], None],
               after: Callable[[str, int], object] = lambda name, turn: None) -> dict[str, list[float]]:
    """Seconds of each name's `work(name, turn)` in each round, of the slowest rank; the order changes from round to round."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(WARM_UP + rounds):
        for name in speed.order(names, turn):
            seconds = speed.timed(lambda name=name, turn=turn: work(name, turn), here.device)
            after(name, turn)
            if turn >= WARM_UP:
                times[name].append(seconds)
    return speed.slowest(collectives.gather_json(times))


def times(here: World, nbytes: int, folder: str, rounds: int) -> dict:
    """Seconds of every save, load and stall; bytes of the state on this rank."""
    state, home = State(here, nbytes), Path(folder)
    place = lambda name, turn: home / f"{name}-{turn}"  # noqa: E731
    saves = take_turns(here, tuple(SAVES), rounds, lambda name, turn: state.save(name, place(name, turn)),
                       lambda name, turn: state.remove(place(name, turn)))
    kept = {name: home / f"kept-{name}" for name in SAVES}
    for name, path in kept.items():
        state.save(name, path)
    loads = take_turns(here, tuple(LOADS), rounds, lambda name, turn: state.load(name, kept["save" if "load" in name else name]))
    for path in kept.values():
        state.remove(path)
    copies = [torch.zeros_like(tensor) for tensor in state.tensors]
    handles: list[checkpoint.AsyncSave] = []

    def stall(name: str, turn: int) -> None:
        if name == "stall":
            handles.append(checkpoint.async_save(place(name, turn), step=1, model=state.model, optimizer=state.optimizer))
        else:
            for copy, tensor in zip(copies, state.tensors, strict=True):
                copy.copy_(tensor)

    def rest(name: str, turn: int) -> None:
        if name == "stall":
            handles[-1].wait()
            collectives.barrier()
            state.remove(place(name, turn))

    stalls = take_turns(here, tuple(STALLS), rounds, stall, rest)
    return {"rank_bytes": state.nbytes, "save": saves, "load": loads, "stall": stalls}


def peaks(here: World, what: str, who: str, nbytes: int, folder: str) -> list[int]:
    """Bytes of the peak of one `what` ("save" or "load") above the start, one number a rank; in fresh processes."""
    small, large = Path(folder, f"small-{who}"), Path(folder, f"large-{who}")
    warm = State(here, 1 << 20)                                          # code, threads and pools, which cost everybody the same
    saver = "save" if "load" in who else who
    warm.save(saver, small)
    warm.load(who, small) if what == "load" else None
    state = State(here, nbytes)
    if what == "load":
        state.save(saver, large)
    del warm
    gc.collect()
    collectives.barrier()
    before = memory.start(here.device)
    state.save(saver, large) if what == "save" else state.load(who, large)
    most = memory.peak(here.device) - before
    for path in (small, large):
        state.remove(path)
    return collectives.gather_json(max(0, most))
