"""The report of a run: every picture of its ledger, as PNG, SVG, Markdown and one web page, and a trace for Perfetto.

Reads ledgers (and the manifest of a checkpoint), draws, writes; this module must never start ranks or import the engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from . import textfile, train_run
from .errors import ConfigError, FsdpRefError
from .ledger import Ledger
from .train_options import FIXED
from .viz import (
    Picture,
    Piece,
    SavedTensor,
    checkpoint_map,
    held_by_stage,
    memory_by_rank,
    memory_over_step,
    peak_waterfall,
    resume_strip,
    shard_map,
    step_timeline,
    weight_lifetimes,
    wire_by_stage,
)
from .viz.page import page
from .viz.shards import item_bytes

TITLE = "What the ranks did in one step"


def write(runs: list[Path], out: Path, *, load_on: int | None = None) -> str:
    """Draw `runs` (folders with a ledger.json, or ledgers) into the folder `out`; returns a sentence that says what was written.

    Each run gets its own pictures and a trace; memory, what is held and what is sent are one picture each, all runs on the same axes. A
    picture that cannot be drawn (a ledger without events, say) is named in the report with the reason. A run's latest checkpoint is drawn
    as it would be loaded by `load_on` ranks (default: as many as saved it).

    Raises:
        FsdpRefError: a ledger is missing or damaged, nothing could be drawn, or `out` cannot be written.
    """
    ledgers = _by_name(runs)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {out} ({error.strerror}); choose another --out") from error
    pictures: dict[str, Picture] = {}
    failed: dict[str, str] = {}
    for name, draw in _plan(ledgers, {name: run for (name, _), run in zip(ledgers.items(), runs, strict=True)}, load_on).items():
        try:
            pictures[name] = draw()
        except FsdpRefError as error:
            failed[name] = str(error)
    if not pictures:
        raise FsdpRefError(f"nothing could be drawn: {next(iter(failed.values()))}")
    for name, picture in pictures.items():
        picture.save(out / f"{name}.png")
        textfile.write(out / f"{name}.svg", picture.svg(), "the picture")
    links = {f"{name}: trace of all ranks, for ui.perfetto.dev": f"{_prefix(ledgers, name)}trace.json" for name, ledger in ledgers.items()
             if ledger.events or ledger.allocations}
    for (_, file), ledger in zip(links.items(), ledgers.values(), strict=False):
        ledger.to_perfetto(out / file)
    notes = [f"{name}: {reason}" for name, reason in failed.items()]
    textfile.write(out / "report.md", _markdown(ledgers, pictures, notes), "the report")
    web = textfile.write(out / "report.html", page(TITLE, _facts(ledgers), pictures, links, notes=notes), "the report")
    return f"{len(pictures)} pictures (PNG, SVG), {web}, report.md and {len(links)} trace{'s' * (len(links) != 1)} for ui.perfetto.dev"


def _plan(ledgers: dict[str, Ledger], runs: dict[str, Path], load_on: int | None) -> dict[str, Callable[[], Picture]]:
    """File name -> what draws it, in the order of the report."""
    plan: dict[str, Callable[[], Picture]] = {}
    for name, ledger in ledgers.items():
        prefix = _prefix(ledgers, name)
        plan[f"{prefix}shards"] = lambda ledger=ledger: shard_map(ledger)
        plan[f"{prefix}timeline"] = lambda ledger=ledger: step_timeline(ledger)
        plan[f"{prefix}ranks"] = lambda ledger=ledger: memory_by_rank(ledger)
        plan[f"{prefix}lifetimes"] = lambda ledger=ledger: weight_lifetimes(ledger, min(ledger.ranks, default=0))
        if "allocator" in ledger.meta:
            plan[f"{prefix}waterfall"] = lambda ledger=ledger: peak_waterfall(ledger, min(ledger.ranks, default=0))
        if (runs[name] / train_run.RESUMES).is_file() and train_run.read_log(runs[name], train_run.RESUMES):
            plan[f"{prefix}resume"] = lambda run=runs[name]: resumed(run, runs.values())
        if (runs[name] / "checkpoints").is_dir():
            plan[f"{prefix}checkpoint"] = lambda run=runs[name]: checkpoint_map(saved_tensors(run / "checkpoints", load_on))
    plan["memory"] = lambda: memory_over_step(ledgers)
    plan["held"] = lambda: held_by_stage(ledgers)
    plan["wire"] = lambda: wire_by_stage(ledgers)
    return plan


def resumed(run: Path, runs: Iterable[Path] = ()) -> Picture:
    """The losses of a run that was resumed: those of the steps that were done twice, or all of them beside one of `runs` that never was
    and trained with the same options.

    Raises:
        FsdpRefError: no step was done twice, and none of `runs` is such a run.
    """
    resumes = train_run.read_log(run, train_run.RESUMES)
    last = next((resume for resume in reversed(resumes) if resume["again"]), resumes[-1])
    losses = _losses(train_run.read_log(run))
    before = {step: loss for step, loss in losses.items() if step <= last["step"]} | _losses(last["again"])
    after = {step: loss for step, loss in losses.items() if step > last["step"]}
    whole = next((_losses(train_run.read_log(other)) for other in runs if other.is_dir() and _left_alone(other, run)), before)
    if not set(whole) & set(after):
        raise FsdpRefError(f"{run} went on after step {last['step']} and did no step twice, so there is nothing to compare; draw it with "
                           "a run of the same options that was left alone: fsdp-ref show RUN OTHER")
    return resume_strip(whole, before, after, saved=last["step"])


def _losses(rows: list[dict]) -> dict[int, float]:
    """Step -> training loss, exact."""
    return {row["step"]: float.fromhex(row["loss_hex"]) for row in rows if "loss_hex" in row}


def _left_alone(other: Path, run: Path) -> bool:
    """Whether `other` was never resumed and trained the same model on the same text in the same way, on as many ranks or not."""
    return (other.resolve() != run.resolve() and not train_run.read_log(other, train_run.RESUMES)
            and _training(other) == _training(run) is not None)


def _training(run: Path) -> list | None:
    """What the losses of a run depend on, rounding apart; None without a config.json."""
    path = run / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        options = config["options"]
        return [config["text"]["xxh3_128"], *(options[name] for name in (*FIXED, "steps", "batch", "lr", "warmup", "dropout"))]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FsdpRefError(f"cannot read {path} ({error}); draw the run that it stands in alone") from error


def saved_tensors(checkpoints: Path, load_on: int | None = None) -> list[SavedTensor]:
    """The latest checkpoint's model tensors as the map's description, as `load_on` ranks would load them.

    Raises:
        FsdpRefError: there is no complete checkpoint.
    """
    from .checkpoint import latest  # it needs torch, which most reports do not
    from .checkpoint.layout import rank_of
    from .checkpoint.manifest import Manifest
    step_dir = latest(checkpoints)
    if step_dir is None:
        raise FsdpRefError(f"{checkpoints} holds no complete checkpoint; save one with fsdp-ref train --save-every")
    manifest = Manifest.read(step_dir)
    ranks = load_on or manifest.world_size
    found = []
    for name, entry in manifest.model.items():
        dim = next((d for piece in entry.pieces for d, size in enumerate(piece.box.sizes) if size != entry.shape[d]), 0)
        rows = entry.shape[dim] if entry.shape else 1
        chunk = -(-rows // ranks)
        loaded = tuple(Piece(rank, min(rank * chunk, rows), min((rank + 1) * chunk, rows)) for rank in range(ranks))
        saved = tuple(Piece(rank_of(piece.file), piece.box.offsets[dim] if entry.shape else 0,
                            (piece.box.offsets[dim] + piece.box.sizes[dim]) if entry.shape else 1, piece.file) for piece in entry.pieces)
        found.append(SavedTensor(name, rows, entry.elements // max(1, rows) * item_bytes(entry.dtype), saved, loaded))
    return found


def _prefix(ledgers: dict[str, Ledger], name: str) -> str:
    return "" if len(ledgers) == 1 else f"{_file_name(name)}-"


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


def _facts(ledgers: dict[str, Ledger]) -> list[str]:
    """A line a run: what its recording says about itself."""
    lines = []
    for name, ledger in ledgers.items():
        facts = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in ledger.meta.items() if key != "strategy")
        lines.append(f"{name}: {facts or 'no facts recorded'}; {len(ledger.events)} events on {len(ledger.ranks)} ranks")
    return lines


def _markdown(ledgers: dict[str, Ledger], pictures: dict[str, Picture], notes: list[str]) -> str:
    lines = [f"# {TITLE}", "", *(f"- {fact}" for fact in _facts(ledgers)), *(f"- not drawn: {note}" for note in notes)]
    for file, picture in pictures.items():
        alt = picture.alt.replace("[", "(").replace("]", ")").replace("\n", " ")
        title, rest = picture.markdown.split("\n", 1)
        lines += ["", title, "", f"![{alt}]({file}.png)", rest.rstrip()]
    return "\n".join(lines) + "\n"
