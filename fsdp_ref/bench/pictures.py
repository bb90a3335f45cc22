"""`fsdp-ref bench pictures`: how long it takes to draw and to export a long recording, and what watching a training run costs it.

    draw     training steps are recorded on real ranks until the ledger holds --events events; this process then draws the timeline and
             the memory, and writes the trace, round by round
    live     the same ranks train on in stretches, in turns with `live.Reporter` and without

Drawing has targets in seconds, for this is how long a reader waits; watching has a ratio within a round. This module checks options,
measures and prints. It must never be called by a test that asserts a time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import collectives, ledger, live, viz
from ..errors import ConfigError
from ..ledger import Ledger
from ..train_options import Parser
from ..world import World
from . import engine, processes, speed, table
from .contenders import Shape, step_of

SMALL = Shape(dim=64, layers=4, batch=1, context=32)           # of the recording: its steps are many, and need not be long
WATCHED = Shape(dim=128, layers=4, batch=8, context=64)        # of the training that is watched
WARM_UP = 3                                                    # steps; by then every one is like the next
WHAT = {"timeline": ("step timeline, drawn", 3.0), "memory": ("memory over the step, drawn", 3.0),
        "trace": ("trace of the events, written", 2.0), "full trace": ("trace with all allocations, written", None)}
LIVE_LIMIT = 1.02
WIDTH = 58


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; prints tables and, with --json, writes the figures.

    Raises:
        ConfigError: an option that cannot work; no rank was started.
        RankError: a rank was lost.
    """
    args = _parser().parse_args(argv)
    _check(args)
    with tempfile.TemporaryDirectory(prefix="fsdp-ref-bench-") as folder:
        result = measure(args, Path(folder))
    print(text(result))
    if args.json:
        table.write_json(result, args.json)
    return 0


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All figures, as --json writes them."""
    machine = processes.run(engine.describe, args.ranks, "cpu")
    processes.run(recording, args.ranks, "cpu", args.events, str(folder / "ledger.json"))
    whole = Ledger.load(folder / "ledger.json")
    seconds = drawing(whole, folder / "trace.json", args.rounds)
    watched = processes.run(watching, args.ranks, "cpu", args.stretch, args.rounds, str(folder / "live"))
    ratios = [with_it / without for with_it, without in zip(watched["watched"], watched["alone"], strict=True)]
    return {"format": "fsdp_ref bench pictures 1", "machine": machine, "unit": "seconds",
            "options": {name: getattr(args, name) for name in ("ranks", "events", "rounds", "stretch")},
            "events": len(whole.events), "allocations": len(whole.allocations),
            "draw": {name: {"rounds": each, "median": statistics.median(each), "min": min(each), "max": max(each), "limit": WHAT[name][1]}
                     for name, each in seconds.items()},
            "live": {**watched, "rounds": ratios, "median": statistics.median(ratios), "min": min(ratios), "max": max(ratios),
                     "limit": LIVE_LIMIT}}


def recording(here: World, events: int, path: str) -> None:
    """Record as many training steps of ZeRO-3 as hold `events` events on all ranks together; rank 0 saves the ledger at `path`."""
    step = step_of("zero3", SMALL, here.device)
    for _ in range(WARM_UP):
        step()
    with ledger.record() as one:
        step()
    steps = -(-events // sum(collectives.gather_json(len(one.events))))
    with ledger.record() as rows:
        for _ in range(steps):
            step()
    whole = collectives.gather_ledgers(rows)
    if here.rank == 0:
        whole.save(path)


def drawing(whole: Ledger, path: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of each picture and of each trace in each of `rounds` rounds, after one that is not kept (fonts are looked for in it)."""
    events_alone = replace(whole, allocations=[])
    work: dict[str, Callable[[], object]] = {
        "timeline": lambda: viz.step_timeline(whole).png(), "memory": lambda: viz.memory_over_step({"recorded": whole}).png(),
        "trace": lambda: events_alone.to_perfetto(path), "full trace": lambda: whole.to_perfetto(path)}
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(1 + rounds):
        for name, act in work.items():
            begin = time.perf_counter()
            act()
            times[name].append(time.perf_counter() - begin)
    return {name: each[1:] for name, each in times.items()}


def watching(here: World, stretch: float, rounds: int, folder: str) -> dict[str, Any]:
    """Seconds a step in stretches of about `stretch` seconds, `rounds` of them with a `live.Reporter` and as many without, in turns."""
    step, reporter = step_of("zero3", WATCHED, here.device), live.Reporter(folder)

    def watched() -> None:
        with reporter.step():
            step()

    def seconds_a_step(act: Callable[[], None], steps: int) -> float:
        collectives.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            act()
        return (time.perf_counter() - begin) / steps

    seconds_a_step(watched, WARM_UP)
    steps = max(collectives.gather_json(max(1, round(stretch / seconds_a_step(step, WARM_UP)))))
    seconds_a_step(watched, steps)                                                      # pays back what the first report cost
    acts = {"alone": step, "watched": watched}
    turns: dict[str, list[float]] = {name: [] for name in acts}
    for turn in range(rounds):
        for name in speed.order(tuple(acts), turn):
            turns[name].append(seconds_a_step(acts[name], steps))
    return {"steps": steps, **speed.slowest(collectives.gather_json(turns))}


def text(result: dict[str, Any]) -> str:
    """The whole report."""
    return "\n".join(_lines(result))


def _lines(result: dict[str, Any]) -> Iterator[str]:
    o, m, watched = result["options"], result["machine"], result["live"]
    yield (f"{o['ranks']} ranks, {o['rounds']} rounds; {m['cores']} cores, torch {m['torch']}, Python {m['python']}, {m['system']}")
    yield ""
    yield f"DRAW: a recording of {result['events']:,} events and {result['allocations']:,} allocations"
    yield f"{'':<{WIDTH}}{'median s':>9}{'min':>8}{'max':>8}   target"
    for name, row in result["draw"].items():
        yield _row(WHAT[name][0], row, 2)
    yield ""
    yield f"LIVE: seconds a step, watched / not watched, in turns of {watched['steps']} steps; the slowest rank counts"
    yield f"{'':<{WIDTH}}{'median':>9}{'min':>8}{'max':>8}   target"
    yield _row("a step with live.Reporter / one without", watched, 3)


def _row(name: str, row: dict[str, Any], digits: int) -> str:
    return (f"{name:<{WIDTH}}{row['median']:>9.{digits}f}{row['min']:>8.{digits}f}{row['max']:>8.{digits}f}"
            f"   {table.at_most(row['median'], row['limit'])}".rstrip())


def _check(args: argparse.Namespace) -> None:
    for name in ("ranks", "events", "rounds"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if not 0 < args.stretch < 3600:
        raise ConfigError(f"--stretch is {args.stretch:g}; it must be above 0 and below 3600 seconds")
    if args.json and (args.json.is_dir() or not args.json.parent.is_dir()):
        raise ConfigError(f"--json {args.json} cannot be written; give a file in a folder that exists")


def _parser() -> argparse.ArgumentParser:
    p = Parser(prog="fsdp-ref bench pictures", description="How long it takes to draw and to export a long recording, and what a live view "
               "costs the training that it watches.", allow_abbrev=False,
               epilog="Timing is only worth something on a machine that does nothing else.")
    p.add_argument("--ranks", type=int, default=2, help="ranks (default 2)")
    p.add_argument("--events", type=int, default=100_000, help="events to record, at least, on all ranks together (default 100000)")
    p.add_argument("--rounds", type=int, default=10, help="times that each is drawn, and pairs of stretches (default 10)")
    p.add_argument("--stretch", type=float, default=6.0, metavar="SECONDS", help="length of a stretch of training (default 6)")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return p
