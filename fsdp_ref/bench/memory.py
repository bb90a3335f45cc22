"""How much memory a process needs for a contender: its peak while it trains, above what it held before the model was built.

A process never gives all of its memory back, so each contender gets fresh rank processes. One step of a tiny model comes first: it loads
code, starts threads and fills pools, which cost the same for everybody. The peak is the operating system's own figure, so it holds
what no ledger sees: activations, the allocator's slack, what the library itself keeps. This module must never compare.
"""

from __future__ import annotations

import gc
import resource
import sys
from pathlib import Path

import psutil
import torch

from .. import collectives
from ..world import World
from .contenders import Shape, step_of

STEPS = 3          # the first makes the optimizer's state, the second meets it, the third shows whether anything still grows
RUNS = 2           # of each contender; what an allocator keeps depends on which rank was late, by up to a tenth
TINY = Shape(dim=16, layers=1, batch=1, context=8)

METHODS = {
    "linux": "peak resident memory (VmHWM in /proc/self/status, set back before the model is built) less resident memory at that moment",
    "other": "peak resident memory of the process (ru_maxrss) less resident memory before the model is built",
    "cuda": "torch.cuda.max_memory_allocated (set back before the model is built) less what was allocated at that moment",
}


def method(device: str) -> str:
    """How the peak is taken on this machine, in words. `device`: "cpu" or "cuda:0"."""
    return METHODS["cuda" if device.startswith("cuda") else "linux" if sys.platform == "linux" else "other"]


def measure(here: World, key: str, shape: Shape) -> list[int]:
    """Bytes of the peak above the start, one number a rank."""
    step_of(key, TINY, here.device)()
    gc.collect()
    before = start(here.device)
    step = step_of(key, shape, here.device)
    for _ in range(STEPS):
        step()
    return collectives.gather_json(max(0, peak(here.device) - before))


def start(device: torch.device) -> int:
    """Bytes in use now; from now on the peak counts."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")        # proc(5): 5 sets the peak back to what is resident now
    return psutil.Process().memory_info().rss


def peak(device: torch.device) -> int:
    """Bytes of the peak since `start`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    if sys.platform == "linux":
        line = next(line for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss                  # bytes on macOS
