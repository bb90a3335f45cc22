"""`fsdp-ref bench engine`: one training step of this engine beside torch's `fully_shard`, torch's DDP, and itself with recording on.

All contenders live in the same ranks and take turns, step by step. A figure is the median over rounds of a ratio *within* a round, so
a noisy machine widens the spread and does not move the middle. This module must never be called by a test that asserts a time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.multiprocessing

from .. import collectives, ledger, world
from ..engine import data_parallel
from ..errors import ConfigError
from ..models import GPT, GPTConfig
from ..placements import DDP, ZERO3

PAIRS = (("fsdp_ref ZeRO-3", "torch fully_shard"), ("fsdp_ref ZeRO-3", "torch DDP"), ("fsdp_ref DDP", "torch DDP"),
         ("fsdp_ref ZeRO-3, recording", "fsdp_ref ZeRO-3"))


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; prints a table and, with --json, writes the figures."""
    args = _parser().parse_args(argv)
    for name in ("ranks", "dim", "layers", "batch", "context", "rounds"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if args.json and not args.json.parent.is_dir():
        raise ConfigError(f"the folder of --json {args.json} does not exist; make it first")
    world.choose_backend(args.ranks, args.device)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="fsdp-ref-bench-") as home:
        torch.multiprocessing.spawn(_rank, (args, home, os.getpid()), nprocs=args.ranks)
        result = json.loads(Path(home, "result.json").read_text(encoding="utf-8"))
    print(_table(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2), encoding="utf-8")
        print(f"figures written to {args.json}")
    return 0


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="fsdp-ref bench engine", description="One training step (forward, backward, AdamW) of this engine "
                                "beside torch's own, taking turns in the same ranks. Prints medians of paired ratios.")
    p.add_argument("--ranks", type=int, default=2, help="ranks (default 2)")
    p.add_argument("--dim", type=int, default=512, help="width of the GPT (default 512)")
    p.add_argument("--layers", type=int, default=6, help="blocks (default 6)")
    p.add_argument("--batch", type=int, default=4, help="sequences a rank (default 4)")
    p.add_argument("--context", type=int, default=128, help="tokens a sequence (default 128)")
    p.add_argument("--rounds", type=int, default=12, help="timed steps of each contender (default 12)")
    p.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="where to compute (default auto)")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return p


def _rank(rank: int, args: argparse.Namespace, home: str, parent: int) -> None:
    world.die_with_parent(parent)
    torch.set_num_threads(1)
    here = world.start(rank, args.ranks, store=Path(home, "store"), device=args.device)
    steps = _contenders(args, here)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(args.rounds + 2):                        # two turns to warm up
        names = list(steps)
        for name in names[turn % len(names):] + names[: turn % len(names)]:        # nobody always goes first
            with ledger.record() if name.endswith("recording") else contextlib.nullcontext():
                collectives.barrier()
                begin = time.perf_counter()
                steps[name]()
                if here.device.type == "cuda":
                    torch.cuda.synchronize()
                seconds = time.perf_counter() - begin
            if turn >= 2:
                times[name].append(seconds)
    everyone = collectives.gather_json(times)
    if rank == 0:
        merged = {name: [max(column) for column in zip(*(each[name] for each in everyone), strict=True)] for name in times}
        result = {"ranks": args.ranks, "device": str(here.device), "torch": torch.__version__, "dim": args.dim, "layers": args.layers,
                  "batch": args.batch, "context": args.context, "seconds": merged}
        Path(home, "result.json").write_text(json.dumps(result), encoding="utf-8")
    world.stop()


def _contenders(args: argparse.Namespace, here: world.World) -> dict[str, Callable[[], None]]:
    """Name -> a function that makes one step. Every contender has its own model and optimizer, with equal weights and data."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def build() -> GPT:
        torch.manual_seed(0)
        heads = next(h for h in (8, 4, 2, 1) if args.dim % h == 0)
        return GPT(GPTConfig(dim=args.dim, layers=args.layers, heads=heads, context=args.context)).to(here.device)

    def torch_sharded() -> GPT:
        model = build()
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)

    tokens = torch.randint(256, (args.batch, args.context + 1), device=here.device)
    ours = _step(data_parallel(build(), ZERO3), tokens)
    return {"fsdp_ref ZeRO-3": ours, "fsdp_ref ZeRO-3, recording": ours, "torch fully_shard": _step(torch_sharded(), tokens),
            "fsdp_ref DDP": _step(data_parallel(build(), DDP), tokens), "torch DDP": _step(DistributedDataParallel(build()), tokens)}


def _step(model: torch.nn.Module, tokens: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        logits = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _table(result: dict) -> str:
    """The figures in words: median milliseconds a step, then the paired ratios."""
    seconds = result["seconds"]
    lines = [f"GPT dim {result['dim']}, {result['layers']} layers, batch {result['batch']} x {result['context']} a rank, fp32, AdamW; "
             f"{result['ranks']} ranks on {result['device'].split(':')[0]}, torch {result['torch']}", "",
             f"{'step of':<30}{'median ms':>11}{'fastest ms':>12}"]
    lines += [f"{name:<30}{statistics.median(values) * 1e3:>11.1f}{min(values) * 1e3:>12.1f}" for name, values in seconds.items()]
    lines += ["", f"{'ratio within a round':<54}{'median':>8}{'min':>8}{'max':>8}"]
    for first, second in PAIRS:
        ratios = [a / b for a, b in zip(seconds[first], seconds[second], strict=True)]
        lines.append(f"{first + ' / ' + second:<54}{statistics.median(ratios):>8.3f}{min(ratios):>8.3f}{max(ratios):>8.3f}")
    return "\n".join(lines)
