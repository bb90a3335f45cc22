"""`fsdp-ref bench checkpoint`: saving and loading beside torch's DCP and beside the bare disk, in one run.

    save     fsdp_ref, DCP with sync_files=True, and plain write + fsync of the same bytes take turns
    load     fsdp_ref verifying every byte and not, DCP, and plain reads; from the page cache, where the files were just written
    stall    async_save until it returns, beside a copy of the state in memory
    memory   peak of fresh processes while they save or load

A figure is the median of ratios *within* a round, so a noisy machine widens the spread and does not move the middle. This module
checks options, calls storage.py and prints. It must never be called by a test that asserts a time.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..train_options import Parser
from . import engine, processes, storage, table

# Ratios of times, and what each should at most be: of, to, limit. A save at 0.8 of the disk's speed takes 1.25 of its time.
RATIOS = {"save": (("save", "dcp", 1.0), ("save", "plain", 1 / 0.8), ("dcp", "plain", None)),
          "load": (("load", "dcp", 1.0), ("load-unverified", "dcp", None), ("load", "plain", None)),
          "stall": (("stall", "copy", 1.2),)}
NAMES = {"save": storage.SAVES, "load": storage.LOADS, "stall": storage.STALLS}
TITLES = {"save": "SAVE: until the checkpoint is committed and on the drive", "load": "LOAD: from the page cache into the same tensors",
          "stall": "STALL of async_save: how long training stands still"}
MEMORY_LIMIT = 64 << 20             # bytes, of ours
PEAKS = (("save", "save"), ("save", "dcp"), ("load", "load"), ("load", "dcp"))
COPIES_ON_DISK = 5                  # what lies in the folder at the fullest moment, in states
WIDTH = 58


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; prints tables and, with --json, writes the figures.

    Raises:
        ConfigError: an option that cannot work; no rank was started.
        RankError: a rank was lost.
    """
    args = _parser().parse_args(argv)
    nbytes = _check(args)
    with tempfile.TemporaryDirectory(prefix="fsdp-ref-bench-", dir=args.dir) as folder:
        result = measure(args, nbytes, folder)
    print(text(result))
    if args.json:
        table.write_json(result, args.json)
    return 0


def measure(args: argparse.Namespace, nbytes: int, folder: str) -> dict[str, Any]:
    """All figures, as --json writes them."""
    machine = processes.run(engine.describe, args.ranks, "cpu")
    raw = processes.run(storage.times, args.ranks, "cpu", nbytes, folder, args.rounds)
    result = {"format": "fsdp_ref bench checkpoint 1", "machine": machine, "unit": "seconds",
              "options": {"ranks": args.ranks, "gib": args.gib, "rounds": args.rounds}, "bytes": raw["rank_bytes"] * args.ranks}
    for part in RATIOS:
        result[part] = figures(raw[part], RATIOS[part])
    result["memory"] = {f"{what} {who}": max(processes.run(storage.peaks, args.ranks, "cpu", what, who, nbytes, folder))
                        for what, who in PEAKS}
    return result


def figures(seconds: dict[str, list[float]], pairs: tuple[tuple[str, str, float | None], ...]) -> dict[str, Any]:
    """Medians and paired ratios.

    Two rounds, a: 2 s and 3 s, b: 4 s and 2 s  ->  ratios a/b 0.5 and 1.5, median 1.0.
    """
    ratios = []
    for of, to, limit in pairs:
        each = [a / b for a, b in zip(seconds[of], seconds[to], strict=True)]
        ratios.append({"of": of, "to": to, "rounds": each, "median": statistics.median(each), "min": min(each), "max": max(each),
                       "limit": limit})
    contenders = {name: {"rounds": each, "median": statistics.median(each), "min": min(each)} for name, each in seconds.items()}
    return {"contenders": contenders, "ratios": ratios}


def text(result: dict[str, Any]) -> str:
    """The whole report."""
    options, machine = result["options"], result["machine"]
    lines = [f"{result['bytes'] / 2**30:.3g} GiB of state, {options['ranks']} ranks, {options['rounds']} rounds; {machine['cores']} cores, "
             f"torch {machine['torch']}, Python {machine['python']}, {machine['system']}"]
    for part in RATIOS:
        lines += ["", *_table(part, result)]
    lines += ["", "PEAK MEMORY above what was there before, of the rank that needs most", f"{'':<{WIDTH}}{'MiB':>11}   target"]
    for name, peak in result["memory"].items():
        what, who = name.split()
        verdict = "" if who == "dcp" else f"<= {MEMORY_LIMIT >> 20} {'met' if peak <= MEMORY_LIMIT else 'missed'}"
        lines.append(f"{what + ': ' + NAMES[what][who]:<{WIDTH}}{peak / 2**20:>11.1f}   {verdict}".rstrip())
    return "\n".join(lines)


def _table(part: str, result: dict[str, Any]) -> Iterator[str]:
    """One measurement: seconds and GiB/s, then the ratios."""
    names, gib = NAMES[part], result["bytes"] / 2**30
    yield f"{TITLES[part]}; the slowest rank counts"
    yield f"{'':<{WIDTH}}{'median ms':>11}{'GiB/s':>8}"
    for name, row in result[part]["contenders"].items():
        yield f"{names[name]:<{WIDTH}}{row['median'] * 1e3:>11.1f}{gib / row['median']:>8.2f}"
    yield f"{'Ratio of the times of one round':<{WIDTH}}{'median':>11}{'min':>8}{'max':>8}   target"
    for row in result[part]["ratios"]:
        verdict = table.at_most(row["median"], row["limit"])
        yield f"{row['of'] + ' / ' + row['to']:<{WIDTH}}{row['median']:>11.3f}{row['min']:>8.3f}{row['max']:>8.3f}   {verdict}".rstrip()


def _check(args: argparse.Namespace) -> int:
    """Refuse what cannot work; returns the bytes of state."""
    for name in ("ranks", "rounds"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if not 0 < args.gib < 1024:
        raise ConfigError(f"--gib is {args.gib:g}; it must be above 0 and below 1024")
    if not args.dir.is_dir():
        raise ConfigError(f"--dir {args.dir} is no folder; make it first")
    if args.json and (args.json.is_dir() or not args.json.parent.is_dir()):
        raise ConfigError(f"--json {args.json} cannot be written; give a file in a folder that exists")
    nbytes, free = int(args.gib * 2**30), shutil.disk_usage(args.dir).free
    if free < COPIES_ON_DISK * nbytes:
        raise ConfigError(f"--dir {args.dir} has {free / 2**30:.1f} GiB free and {COPIES_ON_DISK * args.gib:g} are needed; choose another "
                          "folder or a smaller --gib")
    return nbytes


def _parser() -> argparse.ArgumentParser:
    p = Parser(prog="fsdp-ref bench checkpoint", description="Saving and loading beside torch's DCP and beside the bare disk in one run: "
               "time, peak memory, and how long async_save stops training.",
               epilog="Timing is only worth something on a machine that does nothing else, and only for the disk that --dir is on.",
               allow_abbrev=False)
    p.add_argument("--ranks", type=int, default=2, help="ranks (default 2)")
    p.add_argument("--gib", type=float, default=1.0, help="state of all ranks together, in GiB (default 1)")
    p.add_argument("--dir", type=Path, default=Path("."), metavar="DIR", help="folder on the disk to measure (default: the current one); "
                   f"{COPIES_ON_DISK} times --gib must be free")
    p.add_argument("--rounds", type=int, default=5, help="timed saves and loads of each contender (default 5)")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return p
