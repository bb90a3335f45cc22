"""The report of a run: every picture of its ledger, with its words and numbers, in one Markdown file.

Reads ledgers, draws, writes; this module must never start ranks or import the engine.
"""

from __future__ import annotations

from pathlib import Path

from .errors import ConfigError
from .ledger import Ledger
from .viz import Picture, memory_over_step, shard_map, step_timeline


def write(runs: list[Path], out: Path) -> str:
    """Draw `runs` (folders with a ledger.json, or ledgers) into the folder `out`; returns a sentence that says what was written.

    Each run gets a shard map and a timeline; memory is one picture with all of them on the same axes.

    Raises:
        FsdpRefError: a ledger is missing or holds nothing to draw, or `out` cannot be written.
    """
    ledgers = _by_name(runs)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {out} ({error.strerror}); choose another --out") from error
    pictures: dict[str, Picture] = {}
    for name, ledger in ledgers.items():
        prefix = "" if len(ledgers) == 1 else f"{_file_name(name)}-"
        pictures[f"{prefix}shards"] = shard_map(ledger)
        pictures[f"{prefix}timeline"] = step_timeline(ledger)
    pictures["memory"] = memory_over_step(ledgers)
    for name, picture in pictures.items():
        picture.save(out / f"{name}.png")
    report = out / "report.md"
    report.write_text(_markdown(ledgers, pictures), encoding="utf-8")
    return f"{len(pictures)} pictures and {report}"


def _by_name(runs: list[Path]) -> dict[str, Ledger]:
    """The recorded step of each run, under its strategy's name (and the folder's, where two runs share a strategy)."""
    loaded = []
    for run in runs:
        path = run / "ledger.json" if run.is_dir() else run
        if not path.exists():
            raise ConfigError(f"there is no ledger at {path}; record a step with --ledger, in a new run or while "
                              f"going on with this one: fsdp-ref train --out {run} --resume auto --ledger --steps MORE")
        ledger = Ledger.load(path)
        marked = any(event.phase == "mark" and event.name == "step" for event in ledger.events)
        loaded.append((run, ledger.window("step") if marked else ledger))
    names = [str(ledger.meta.get("strategy", run.name)) for run, ledger in loaded]
    named = {}
    for name, (run, ledger) in zip(names, loaded, strict=True):
        named[name if names.count(name) == 1 else f"{name} {run.resolve().name}"] = ledger
    if len(named) < len(loaded):
        raise ConfigError("the same run was given twice; give each run once")
    return named


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in name.lower())


def _markdown(ledgers: dict[str, Ledger], pictures: dict[str, Picture]) -> str:
    lines = ["# What the ranks did in one step", ""]
    for name, ledger in ledgers.items():
        facts = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in ledger.meta.items() if key != "strategy")
        lines.append(f"- **{name}**: {facts or 'no facts recorded'}; {len(ledger.events)} events on {len(ledger.ranks)} ranks")
    for file, picture in pictures.items():
        alt = picture.alt.replace("[", "(").replace("]", ")").replace("\n", " ")
        title, rest = picture.markdown.split("\n", 1)
        lines += ["", title, "", f"![{alt}]({file}.png)", rest.rstrip()]
    return "\n".join(lines) + "\n"
