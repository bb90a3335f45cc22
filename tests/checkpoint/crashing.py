"""Processes that die in the middle of a save, at every operation in turn, and what is on the disk then.

All forks come from one young process (`in_a_young_process`) that has torch imported and no threads, so a start takes milliseconds.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import traceback
import uuid
import warnings
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import nn

from fsdp_ref import checkpoint, world
from fsdp_ref.checkpoint import files, retention
from fsdp_ref.engine import fully_shard

from .faults import CUTS, DEATHS, Faults, PowerCut, cases
from .support import everything, names

CALLS = ("save", "async_save")
context = get_context("forkserver")
context.set_forkserver_preload(["tests.checkpoint.crashing", "torch._dynamo"])        # an optimizer imports the latter when it is made


def small(seed: int, shard: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two parameters and their moments after one step. No backward: autograd's threads and fork do not go together."""
    model = nn.Linear(3, 5)
    if shard:
        fully_shard(model)
    return stepped(model, torch.optim.AdamW(model.parameters(), lr=0.1), seed)


def tiny(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """One parameter and its momentum, which every rank has whole."""
    model = nn.Linear(3, 5, bias=False)
    return stepped(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), seed)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Values that follow from `seed`, and one step."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(seed)
            parameter.grad = torch.full_like(parameter, seed + 0.5)
    optimizer.step()
    return model, optimizer


def write(call: str, root: Path, step: int) -> Path:
    """Save the tiny model of a step and keep that checkpoint alone; "async_save" does it in a thread."""
    model, optimizer = tiny(step)
    saved = getattr(checkpoint, call)(root, step=step, model=model, optimizer=optimizer, keep_last=1)
    return saved if call == "save" else saved.wait()


# -- worlds of forked processes -----------------------------------------------------------------------------------------------


def saver(rank: int, size: int, meeting: str, root: Path, call: str, layer: files.Files) -> str:
    """Save step 2; returns what came of it, as JSON: the operations, or the error."""
    warnings.simplefilter("ignore")
    if size > 1:
        world.start(rank, size, store=meeting, timeout=20)
    with files.use(layer):
        try:
            write(call, root, 2)
            return json.dumps(layer.log)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def run(root: Path, call: str, layers: list[files.Files]) -> list[str]:
    """Save step 2 on as many forked processes as there are layers; what each says, or "killed"."""
    report = root.parent / uuid.uuid4().hex
    children = []
    for rank, layer in enumerate(layers):
        pid = os.fork()
        if pid == 0:
            try:
                Path(f"{report}-{rank}").write_text(saver(rank, len(layers), f"{report}-meeting", root, call, layer))
            except BaseException:
                Path(f"{report}-{rank}").write_text(traceback.format_exc())
            finally:
                os._exit(0)
        children.append(pid)
    codes = {}
    while len(codes) < len(layers):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
    return ["killed" if codes[pid] == -signal.SIGKILL else Path(f"{report}-{rank}").read_text() for rank, pid in enumerate(children)]


# -- what is on the disk ------------------------------------------------------------------------------------------------------


def loaded(root: Path, make=small) -> tuple[int, dict]:
    """Load into fresh targets in this process (a world of one)."""
    model, optimizer = make(99)
    report = checkpoint.load(root, model=model, optimizer=optimizer)
    return report.step, everything(model, optimizer)


def expected(step: int, make=small) -> dict:
    return everything(*make(step))


def check_survived(root: Path) -> int:
    """Old or new, whole, by every way of asking; then the next save works and sweeps. Returns the step that was found."""
    step, state = loaded(root, tiny)
    assert step in (1, 2) and state == expected(step, tiny)
    assert checkpoint.latest(root) == checkpoint.committed(root)[-1]
    for path in checkpoint.committed(root):
        checkpoint.verify(path)
    retention._protected = None                       # the next save is another process's, which has loaded nothing
    after = 3 if step == 2 else 2
    with files.use(Faults()):
        write("save", root, after)
    assert names(root) == ["latest", f"step-{after:08d}"]
    return step


def renew(root: Path, old: Path) -> None:
    """Put the old checkpoint back; its files are links, for nobody writes into them."""
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(old, root, copy_function=os.link)


# -- the matrices -------------------------------------------------------------------------------------------------------------


def matrix(home: Path, size: int, call: str) -> dict:
    """Every way to die at every operation of every rank; on one rank every way to lose power too."""
    old, root = home / "old", home / "root"
    with files.use(Faults()):
        write("save", old, 1)
    renew(root, old)
    logs = [json.loads(said) for said in run(root, call, [Faults() for _ in range(size)])]
    assert check_survived(root) == 2
    rows = []
    for who in range(size):
        for at, kind in cases(logs[who], DEATHS + (CUTS if size == 1 else ())):
            renew(root, old)
            fault = PowerCut(at, kind, home / f"grave-{len(rows)}") if kind in CUTS else Faults(at, kind)
            began = time.monotonic()
            said = run(root, call, [fault if rank == who else Faults() for rank in range(size)])
            seconds = time.monotonic() - began
            rows.append({"who": who, "at": at, "kind": kind, "said": said, "seconds": seconds, "step": check_survived(root)})
    return {"logs": logs, "rows": rows}


def new_root(home: Path) -> dict:
    """Lose all that was not flushed at the very end of a first save, into a directory whose parents did not exist either."""
    root = home / "a" / "b"
    log = json.loads(run(home / "other" / "root", "save", [Faults()])[0])
    said = run(root, "save", [PowerCut(len(log), "names lost", home / "grave")])
    return {"log": log, "said": said, "step": loaded(root, tiny)[0]}


def _young(home: Path, work, arguments: tuple) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        result = work(home, *arguments)
    except BaseException:
        result = {"error": traceback.format_exc()}
    (home / "result.json").write_text(json.dumps(result))
    os._exit(0)


def in_a_young_process(home: Path, work, *arguments, limit: float = 240.0) -> dict:
    """`work(home, *arguments)` in a process that has just been forked from the fork server."""
    job = context.Process(target=_young, args=(home, work, arguments))
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
