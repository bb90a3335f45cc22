"""Rank processes for a benchmark: fresh ones for every call, one result, and nobody left behind.

On Linux a fork server has torch loaded already, so that fresh ranks are up in a moment; elsewhere each rank loads it anew. Ranks end
with the process that started them. This module must never measure anything.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch.multiprocessing import ProcessExitedException

from .. import errors, world
from ..errors import FsdpRefError, RankError

METHOD = "forkserver" if sys.platform == "linux" else "spawn"
PRELOAD = ["torch.distributed.fsdp", "torch._dynamo", "fsdp_ref.bench.speed", "fsdp_ref.bench.memory", "fsdp_ref.bench.link",
           "fsdp_ref.bench.storage"]
REPORT = "error.json"


def run(work: Callable[..., Any], ranks: int, device: str, *args: Any) -> Any:
    """Call `work(here, *args)` on `ranks` new processes; returns what it returned on rank 0 (anything `json.dumps` takes).

    Args:
        work: a function at the top level of a module; `here` is the rank's `world.World`. One thread a rank computes.

    Raises:
        FsdpRefError: the first error of that family that a rank reported.
        RankError: a rank was killed.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")                      # before torch is loaded by whoever makes the ranks
    if METHOD == "forkserver":
        multiprocessing.get_context(METHOD).set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="fsdp-ref-bench-") as home:
        try:
            torch.multiprocessing.start_processes(_rank, (work, ranks, device, home, os.getpid(), args), nprocs=ranks, start_method=METHOD)
        except ProcessExitedException as failure:
            raise _explain(failure, Path(home, REPORT)) from None
        return json.loads(Path(home, "result.json").read_text(encoding="utf-8"))


def _rank(rank: int, work: Callable[..., Any], ranks: int, device: str, home: str, parent: int, args: tuple) -> None:
    world.die_with_parent(parent)
    torch.set_num_threads(1)
    try:
        here = world.start(rank, ranks, store=Path(home, "store"), device=device)
        result = work(here, *args)
        if rank == 0:
            Path(home, "result.json").write_text(json.dumps(result), encoding="utf-8")
        world.stop()
    except FsdpRefError as error:
        _report(error, rank, Path(home, REPORT))
        os._exit(error.exit_code)


def _report(error: FsdpRefError, rank: int, path: Path) -> None:
    """Write down why this rank failed, unless another did so before: what follows from the first error is not the cause."""
    draft = path.with_name(f"{path.name}.{rank}")
    draft.write_text(json.dumps({"kind": type(error).__name__, "text": f"rank {rank}: {error}"}), encoding="utf-8")
    try:
        os.link(draft, path)                                           # fails where the file exists: the first one stays
    except FileExistsError:
        pass


def _explain(failure: ProcessExitedException, report: Path) -> FsdpRefError:
    if report.exists():
        told = json.loads(report.read_text(encoding="utf-8"))
        return getattr(errors, told["kind"], RankError)(told["text"])
    if failure.exit_code < 0:
        hint = "; the system may have run out of memory, choose a smaller --dim, --layers or --batch"
        return RankError(f"rank {failure.error_index} of the benchmark was killed by {failure.signal_name}"
                         + (hint if failure.exit_code == -signal.SIGKILL else "; start it again"))
    return RankError(f"rank {failure.error_index} of the benchmark ended with exit code {failure.exit_code}; look at its output above")
