"""Two real ranks that check the collectives of this machine: right numbers, a mean that is a mean, and how long each takes.

`run_self_test` starts them, waits a bounded time and kills what is left; it must never leave a process or a file behind.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from . import collectives, world
from .collectives import Label

LIMIT = 30.0            # seconds for everything; about 6 on a quiet machine, most of it importing torch twice
WAIT = 8.0              # seconds a collective of the test may wait

TURNS = 25              # small messages with, and as many without, the comparison of calls
CHECKED = "small all-reduce, calls compared"
REDUCTIONS = (("sum", dist.ReduceOp.SUM, 3.0), ("mean", dist.ReduceOp.AVG, 1.5), ("largest", dist.ReduceOp.MAX, 2.0),
              ("smallest", dist.ReduceOp.MIN, 1.0), ("product", dist.ReduceOp.PRODUCT, 2.0))

Result = tuple[str, bool, float]


def run_self_test(limit: float = LIMIT) -> tuple[list[Result], str]:
    """Each collective's name, whether its numbers were right on both ranks, and its time in seconds; and what went wrong, if it did."""
    with tempfile.TemporaryDirectory(prefix="fsdp-ref-doctor-") as home:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        code = "import sys; from fsdp_ref.selftest import rank; rank(int(sys.argv[1]), sys.argv[2])"
        ranks = [subprocess.Popen([sys.executable, "-c", code, str(number), home], env=environment, stdin=subprocess.DEVNULL,
                                  stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for number in (0, 1)]
        try:
            return _collect(ranks, Path(home), limit)
        finally:
            for process in ranks:
                process.kill()
                process.communicate()


def _collect(ranks: list[subprocess.Popen], home: Path, limit: float) -> tuple[list[Result], str]:
    """Wait for both ranks and put their answers together."""
    deadline = time.monotonic() + limit
    for number, process in enumerate(ranks):
        try:
            _, errors = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            return [], f"rank {number} of 2 did not finish within {limit:g} s"
        if process.returncode:
            last = (errors.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
            return [], f"rank {number} of 2 failed: {last}"
    answers = [json.loads((home / f"result-{number}.json").read_text()) for number in (0, 1)]
    return [(name, right and other[1], max(seconds, other[2]))
            for (name, right, seconds), other in zip(*answers, strict=True)], ""


def rank(number: int, home: str) -> None:
    """What each of the two processes runs: every collective once to warm up, once to time it; the answers go to a file."""
    world.die_with_parent()
    torch.set_num_threads(1)
    here = world.start(number, 2, store=Path(home) / "store", timeout=WAIT)
    collectives_under_test(here)
    Path(home, f"result-{number}.json").write_text(json.dumps(collectives_under_test(here)))
    world.stop()


def collectives_under_test(here: world.World) -> list[Result]:
    """Every collective and reduction on a million numbers, checked against what it must give; and a small one with and without the
    comparison of calls.

    rank 0 holds 1 everywhere and rank 1 holds 2: a sum is 3, a mean 1.5, a product 2, a gather 1 1 ... 2 2. The library's own reductions
    are tried too: checkpoints of torch, and whoever watches collectives by name, use them.
    """
    count, label, group = 2**20, Label("self-test", "check"), dist.group.WORLD
    mine, results = torch.full((count,), here.rank + 1.0, device=here.device), []

    def check(name: str, call: Callable[[], object], result: torch.Tensor, expected: torch.Tensor | float) -> None:
        begin = time.perf_counter()
        if isinstance(pending := call(), collectives.Pending):
            pending.wait()
        right = bool((result.cpu() == torch.as_tensor(expected)).all())                  # .cpu() also waits for the device
        results.append((name, right, time.perf_counter() - begin))

    full = torch.empty(2 * count, device=here.device)
    check("all-gather", lambda: collectives.all_gather(full, mine, group, label), full, torch.tensor([1.0, 2.0]).repeat_interleave(count))
    for route in ("direct", "library"):
        for name, op, value in REDUCTIONS if route == "library" else REDUCTIONS[:2]:
            half, source, whole = torch.empty(count // 2, device=here.device), mine.clone(), mine.clone()
            title = name if route == "direct" or here.backend == "nccl" else f"{name}, the library's own"
            with collectives.route(route):
                check(f"reduce-scatter ({title})", partial(collectives.reduce_scatter, half, source, group, label, op=op), half, value)
                check(f"all-reduce ({title})", partial(collectives.all_reduce, whole, group, label, op=op), whole, value)
    sent = mine.clone()
    check("broadcast", partial(collectives.broadcast, sent, group, label, source=1), sent, 2.0)
    facts = torch.zeros(2)
    check("exchange of facts", lambda: facts.copy_(torch.tensor(collectives.gather_json(here.rank, group))), facts,
          torch.tensor([0.0, 1.0]))
    return [*results, *_cost_of_checking(here, label)]


def _cost_of_checking(here: world.World, label: Label) -> list[Result]:
    """A small all-reduce with and without the comparison of calls, in turns: the median of each."""
    times: dict[bool, list[float]] = {False: [], True: []}
    small = torch.ones(256, device=here.device)
    for number in range(2 * TURNS):
        with collectives.check_calls(number % 2 == 1):
            begin = time.perf_counter()
            collectives.all_reduce(small, dist.group.WORLD, label).wait()
            small.sum().item()                                      # waits for the device
            times[number % 2 == 1].append(time.perf_counter() - begin)
    return [("small all-reduce", True, statistics.median(times[False])), (CHECKED, True, statistics.median(times[True]))]
