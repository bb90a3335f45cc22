"""The figures in words, for a person at a terminal: every number is one of the JSON's, with its unit and what it means.

This module must never compute a figure: it rounds and aligns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .contenders import NAMES, Shape

WIDTH = 58
LONGEST = 3                            # waits named for each prefetch
STANDARD = Shape()                     # what the targets are stated for


def text(result: dict[str, Any]) -> str:
    """The whole report: what ran where, then one table for each measurement that was made."""
    lines = list(_head(result))
    for name, rows in (("time", _speed), ("memory", _memory), ("link", _link)):
        if name in result:
            lines += ["", *rows(result[name], result)]
    if not _standard(result):
        lines += ["", f"The targets are for dim {STANDARD.dim}, {STANDARD.layers} layers, batch {STANDARD.batch} x {STANDARD.context} "
                  "on two cores; this run is another one."]
    return "\n".join(lines)


def _standard(result: dict[str, Any]) -> bool:
    machine, options = result["machine"], result["options"]
    return (Shape(**{name: options[name] for name in ("dim", "layers", "batch", "context")}) == STANDARD
            and machine["device"] == "cpu" and machine["cores"] == 2)


def _head(result: dict[str, Any]) -> Iterator[str]:
    o, m = result["options"], result["machine"]
    where = m["gpu"] or f"CPU, {_count(m['cores'], 'core')}, {m['threads']} thread a rank"
    yield (f"GPT dim {o['dim']}, {_count(o['layers'], 'layer')} ({result['parameters'] / 1e6:.3g} M parameters), "
           f"batch {o['batch']} x {o['context']} a rank, fp32, AdamW")
    yield f"{_count(o['ranks'], 'rank')} on {where}; torch {m['torch']}, Python {m['python']}, {m['system']}"


def _speed(figures: dict[str, Any], result: dict[str, Any]) -> Iterator[str]:
    yield (f"STEP TIME: forward, backward and optimizer; {_count(result['options']['rounds'], 'round')}, a step of everyone in each; "
           "the slowest rank counts")
    yield f"{'':<{WIDTH}}{'median ms':>11}{'fastest ms':>12}"
    for key, row in figures["contenders"].items():
        yield f"{NAMES[key]:<{WIDTH}}{row['median'] * 1e3:>11.1f}{row['min'] * 1e3:>12.1f}"
    if figures["ratios"]:
        yield ""
        yield "Ratio of two steps of the same round (0.85: the first needs 85 % of the second's time)"
        yield f"{'':<{WIDTH}}{'median':>8}{'min':>8}{'max':>8}   target"
    for row in figures["ratios"]:
        yield (f"{NAMES[row['of']] + ' / ' + NAMES[row['to']]:<{WIDTH}}{row['median']:>8.3f}{row['min']:>8.3f}{row['max']:>8.3f}"
               f"   {at_most(row['median'], row['target'])}".rstrip())


def _memory(figures: dict[str, Any], result: dict[str, Any]) -> Iterator[str]:
    yield (f"PEAK PROCESS MEMORY above the start, of the rank that needs most; {figures['steps']} steps in fresh processes, "
           f"median of {_runs(figures)}")
    yield f"({figures['method']})"
    yield f"{'':<{WIDTH}}{'MiB':>11}{'/ torch fully_shard':>21}   target"
    for key, row in figures["contenders"].items():
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
        target = "" if row["ratio"] is None else at_most(row["ratio"], row["target"])
        yield f"{NAMES[key]:<{WIDTH}}{row['peak'] / 2**20:>11.1f}{ratio:>21}   {target}".rstrip()


def _runs(figures: dict[str, Any]) -> str:
    return _count(len(next(iter(figures["contenders"].values()))["runs"]), "run")


def _link(figures: dict[str, Any], result: dict[str, Any]) -> Iterator[str]:
    block = figures["block"]
    yield (f"EMULATED LINK: {figures['bandwidth'] / 1e6:.4g} MB/s, latency {figures['latency'] * 1e3:.3g} ms: gathering one block "
           f"({block['gathered_bytes'] / 1e6:.3g} MB) takes {block['gather_seconds'] * 1e3:.1f} ms,")
    yield (f"{figures['ratio']:g} of its forward ({block['forward_seconds'] * 1e3:.1f} ms); without the slow link a step takes "
           f"{figures['bare_step']['median'] * 1e3:.1f} ms. Exposed: a rank waits and computes nothing.")
    yield f"{'fsdp_ref ZeRO-3':<{WIDTH - 20}}{'step ms':>11}{'communication ms':>18}{'exposed ms':>12}{'hidden %':>10}   target"
    for ahead, row in figures["prefetch"].items():
        label = f"prefetch {ahead}" + (" (off)" if ahead == "0" else "")
        target = row["target_percent"]
        verdict = "" if target is None else f">= {target:g} % {'met' if row['hidden_percent'] >= target else 'missed'}"
        yield (f"{label:<{WIDTH - 20}}{row['step'] * 1e3:>11.1f}{row['communication'] * 1e3:>18.1f}{row['exposed'] * 1e3:>12.1f}"
               f"{row['hidden_percent']:>10.1f}   {verdict}").rstrip()
    yield "Longest waits, ms a step:"
    for ahead, row in figures["prefetch"].items():
        longest = list(row["waits"].items())[:LONGEST]
        yield f"  with prefetch {ahead}: " + (", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in longest) or "none")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def at_most(value: float, target: float | None) -> str:
    """ "<= 0.85 met", "<= 0.85 missed", or "" where there is no target."""
    return "" if target is None else f"<= {target:.2f} {'met' if value <= target else 'missed'}"


def write_json(result: dict[str, Any], path: Path) -> None:
    """Write the raw figures, and say where. Raises ConfigError when the file cannot be written."""
    try:
        path.write_text(json.dumps(result, indent=2), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write --json {path} ({error.strerror}); choose another file") from error
    print(f"\nfigures written to {path}")
