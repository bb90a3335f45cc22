"""`fsdp-ref bench engine`: this engine beside torch's `fully_shard` and DDP, in one run: step time, memory, and what a slow link hides.

    time     contenders take turns in the same ranks; a figure is the median of ratios *within* a round, so a noisy machine widens the
             spread and does not move the middle (speed.py)
    memory   peak of fresh processes, one contender after the other (memory.py)
    link     ZeRO-3 on an emulated slow network, with prefetch off, 1 and 2 (link.py)

This module checks options, calls the three and prints. It must never be called by a test that asserts a time.
"""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path
from typing import Any

import torch

from .. import world
from ..errors import ConfigError
from ..train_options import Parser
from . import figures, link, memory, processes, speed, table
from .contenders import NAMES, RECORDING, Shape

PHASES = ("time", "memory", "link")
LINK_ROUNDS = 6                # slow steps of each prefetch, at most: the model decides most of their length, so they vary little
LEAST_ONE = ("ranks", "dim", "layers", "batch", "context", "rounds")


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; prints tables and, with --json, writes the figures.

    Raises:
        ConfigError: an option that cannot work; no rank was started.
        RankError: a rank was lost.
    """
    args = _parser().parse_args(argv)
    _check(args, emulates=world.choose_backend(args.ranks, args.device) == "gloo")
    result = measure(args)
    print(table.text(result))
    if args.json:
        table.write_json(result, args.json)
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures, as --json writes them. `args`: the checked options."""
    shape = Shape(args.dim, args.layers, args.batch, args.context)
    machine = processes.run(describe, args.ranks, args.device)
    options = {name: getattr(args, name) for name in (*LEAST_ONE, "device", "only", "contenders", "link_ratio")}
    result = {"format": "fsdp_ref bench engine 1", "machine": machine, "options": options, "parameters": shape.config.parameters()}
    if "time" in args.only:
        seconds = processes.run(speed.measure, args.ranks, args.device, args.contenders, shape, args.rounds)
        result["time"] = figures.speed(seconds, args.ranks)
    if "memory" in args.only:
        peaks: dict[str, list] = {key: [] for key in args.contenders if key != RECORDING}
        for key in [*peaks] * memory.RUNS:
            peaks[key].append(processes.run(memory.measure, args.ranks, args.device, key, shape))
        result["memory"] = figures.memory(peaks, memory.method(machine["device"]), memory.STEPS)
    if "link" in args.only:
        raw = processes.run(link.measure, args.ranks, args.device, shape, args.link_ratio, min(args.rounds, LINK_ROUNDS))
        result["link"] = figures.link(raw, args.link_ratio)
    return result


def describe(here: world.World) -> dict[str, Any]:
    """The machine as a rank sees it. Nothing that names it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"device": here.device.type, "gpu": torch.cuda.get_device_name(here.device) if here.device.type == "cuda" else None,
            "cores": cores, "threads": torch.get_num_threads(), "processor": platform.machine(), "system": platform.system(),
            "python": platform.python_version(), "torch": torch.__version__}


def _check(args: argparse.Namespace, emulates: bool) -> None:
    """Refuse what cannot work; make lists of names. `emulates`: whether ranks compute where a link can be emulated (the CPU)."""
    for name in LEAST_ONE:
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if not 0 < args.link_ratio < float("inf"):
        raise ConfigError(f"--link-ratio is {args.link_ratio:g}; it must be above 0")
    if args.json and not args.json.parent.is_dir():
        raise ConfigError(f"the folder of --json {args.json} does not exist; make it first")
    if args.json and args.json.is_dir():
        raise ConfigError(f"--json {args.json} is a folder; give the name of a file in it")
    args.contenders = _listed("contenders", args.contenders, tuple(NAMES))
    if args.only is None:
        args.only = PHASES if args.ranks > 1 and emulates else PHASES[:2]
    else:
        args.only = _listed("only", args.only, PHASES)
    if "link" in args.only and args.ranks == 1:
        raise ConfigError("--only link needs at least 2 ranks, a single one sends nothing; give --ranks 2")
    if "link" in args.only and not emulates:
        raise ConfigError("--only link emulates a network between ranks that compute on the CPU; give --device cpu")


def _listed(option: str, given: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The names of a comma-separated list, in the order of `known`, each once."""
    names = {name.strip() for name in given.split(",")}
    if unknown := sorted(names - set(known)):
        raise ConfigError(f"--{option} has {unknown[0]!r}, which is not known; choose from {', '.join(known)}")
    return tuple(name for name in known if name in names)


def _parser() -> argparse.ArgumentParser:
    p = Parser(prog="fsdp-ref bench engine", description="This engine beside torch's own in one run: time of a training step (contenders "
               "take turns in the same ranks), peak process memory, and how much communication an emulated slow link leaves exposed.",
               epilog=f"contenders: {', '.join(NAMES)}. Timing is only worth something on a machine that does nothing else.",
               allow_abbrev=False)
    p.add_argument("--ranks", type=int, default=2, help="ranks (default 2)")
    p.add_argument("--dim", type=int, default=512, help="width of the GPT (default 512)")
    p.add_argument("--layers", type=int, default=6, help="blocks (default 6)")
    p.add_argument("--batch", type=int, default=4, help="sequences a rank (default 4)")
    p.add_argument("--context", type=int, default=128, help="tokens a sequence (default 128)")
    p.add_argument("--rounds", type=int, default=12, help="timed steps of each contender (default 12)")
    p.add_argument("--contenders", default=",".join(NAMES), metavar="LIST", help="who takes part, separated by commas (default: all)")
    p.add_argument("--only", metavar="LIST", help="what to measure: time, memory, link, separated by commas (default: all)")
    p.add_argument("--link-ratio", type=float, default=0.8, metavar="X",
                   help="the emulated link gathers one block in X times the block's forward (default 0.8)")
    p.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="where to compute (default auto)")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return p
