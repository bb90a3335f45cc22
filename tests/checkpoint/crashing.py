"""Processes that die in the middle of a save.

All forks come from one young process (`in_a_young_process`) that has torch imported and no threads, so a start takes milliseconds.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import traceback
import uuid
import warnings
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import nn

from fsdp_ref import checkpoint, world
from fsdp_ref.checkpoint import files
from fsdp_ref.engine import fully_shard

from .support import Tripwire, everything, names

KILLED = 77
context = get_context("forkserver")
context.set_forkserver_preload(["tests.checkpoint.crashing"])


def small(seed: int, shard: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two parameters and their moments after one step. No backward: autograd's threads and fork do not go together."""
    model = nn.Linear(3, 5)
    if shard:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(seed)
            parameter.grad = torch.full_like(parameter, seed + 0.5)
    optimizer.step()
    return model, optimizer


class PowerCut(Tripwire):
    """As `Tripwire`, and what was not flushed is gone when the process dies."""

    def __init__(self, at: int) -> None:
        super().__init__(at, self.cut)
        self.unflushed: dict[int, int] = {}

    def create(self, path):
        descriptor = super().create(path)
        self.unflushed[descriptor] = os.dup(descriptor)
        return descriptor

    def fsync(self, descriptor):
        super().fsync(descriptor)
        os.close(self.unflushed.pop(descriptor))

    def cut(self) -> None:
        for descriptor in self.unflushed.values():
            os.ftruncate(descriptor, 0)
        os._exit(KILLED)


def saver(rank: int, size: int, meeting: str, root: Path, step: int, who: int, at: int, keep_last: int | None, power: bool) -> str:
    """Save step `step`; rank `who` dies in the place of its disk operation number `at`. Returns what came of it."""
    warnings.simplefilter("ignore")
    if size > 1:
        world.start(rank, size, store=meeting, timeout=10)
    model, optimizer = small(step, shard=size > 1)
    layer = files.Files()
    if rank == who:
        layer = PowerCut(at) if power else Tripwire(at, lambda: os._exit(KILLED))
    with files.use(layer):
        try:
            checkpoint.save(root, step=step, model=model, optimizer=optimizer, keep_last=keep_last)
            return f"saved after {len(getattr(layer, 'log', []))}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def run(root: Path, size: int, step: int, who: int, at: int, keep_last: int | None = None, power: bool = False) -> list[str]:
    """Save on `size` forked processes; what each says, or "killed"."""
    report = root.parent / uuid.uuid4().hex
    children = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            try:
                Path(f"{report}-{rank}").write_text(saver(rank, size, f"{report}-meeting", root, step, who, at, keep_last, power))
            except BaseException:
                Path(f"{report}-{rank}").write_text(traceback.format_exc())
            finally:
                os._exit(0)
        children.append(pid)
    codes = {}
    while len(codes) < size:
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
    return ["killed" if codes[pid] == KILLED else Path(f"{report}-{rank}").read_text() for rank, pid in enumerate(children)]


def loaded(root: Path) -> tuple[int, dict]:
    """Load into fresh targets in this process (a world of one)."""
    model, optimizer = small(99)
    report = checkpoint.load(root, model=model, optimizer=optimizer)
    return report.step, everything(model, optimizer)


def expected(step: int) -> dict:
    return everything(*small(step))


def check_survived(root: Path) -> int:
    """Old or new, whole, by every way of asking; then the next save works and sweeps. Returns the step that was found."""
    step, state = loaded(root)
    assert step in (1, 2) and state == expected(step)
    assert checkpoint.latest(root) == checkpoint.committed(root)[-1]
    for path in checkpoint.committed(root):
        checkpoint.verify(path)
    model, optimizer = small(3)
    checkpoint.save(root, step=3 if step == 2 else 2, model=model, optimizer=optimizer)
    assert [name for name in names(root) if ".tmp-" in name] == []
    return step


def matrix(home: Path, size: int, who: int, parts: int, keep_last: int | None, power: bool) -> dict:
    """Kill rank `who` at every operation of a save over an old checkpoint (or at so many of them, spread evenly)."""
    old, root = home / "old", home / "root"
    model, optimizer = small(1)
    checkpoint.save(old, step=1, model=model, optimizer=optimizer)
    shutil.copytree(old, root)
    total = int(run(root, size, 2, who, 0, keep_last)[who].removeprefix("saved after "))
    points = range(1, total + 1) if parts == 0 else sorted({1 + part * (total - 1) // (parts - 1) for part in range(parts)})
    rows = []
    for at in points:
        shutil.rmtree(root)
        shutil.copytree(old, root)
        said = run(root, size, 2, who, at, keep_last, power)
        rows.append({"at": at, "said": said, "step": check_survived(root)})
    return {"total": total, "rows": rows}


def _young(home: Path, arguments: tuple) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        result = matrix(home, *arguments)
    except BaseException:
        result = {"error": traceback.format_exc()}
    (home / "result.json").write_text(json.dumps(result))
    os._exit(0)


def in_a_young_process(home: Path, *arguments, limit: float = 120.0) -> dict:
    """`matrix(home, *arguments)` in a process that has just been forked from the fork server."""
    job = context.Process(target=_young, args=(home, arguments))
    job.start()
    deadline = time.monotonic() + limit
    while job.is_alive() and time.monotonic() < deadline:
        job.join(1)
    if job.is_alive():
        job.kill()
        raise AssertionError(f"the kill matrix did not end within {limit} s")
    result = json.loads((home / "result.json").read_text())
    assert "error" not in result, result["error"]
    return result
