"""A run's folder: its options, its log, its checkpoints, and who is using it.

    RUN/config.json                  the options, the text (with its digest), the versions
    RUN/log.jsonl                    one line a step, in order, each step once
    RUN/resumes.jsonl                one line a resume: the step it went on after, and the lines of the log that are done again
    RUN/checkpoints/step-00000040/   see fsdp_ref.checkpoint
    RUN/ledger.json                  with --ledger: one recorded step of every rank

Only rank 0 writes here (the checkpoint apart). This module must never import torch, and never delete a checkpoint or another
run's log.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from .errors import CheckpointError, ConfigError

FORMAT = "fsdp_ref run 1"
RESUMES = "resumes.jsonl"
STEP_FOLDER = re.compile(r"step-[0-9]{8,}")


@dataclass
class Start:
    """Where a run begins: `source` is what to hand to `checkpoint.load` (None: at step 0), `saved` the options of the run it is from."""

    source: Path | None
    saved: dict | None


def new_name() -> str:
    """A folder for a run without --out: by the time of its start."""
    return os.path.join("runs", time.strftime("%Y-%m-%d_%H-%M-%S"))


def checkpoints(run: Path) -> list[Path]:
    """The folders under RUN/checkpoints that have a checkpoint's name, oldest first (whether they are whole, loading tells)."""
    home = run / "checkpoints"
    found = [path for path in home.iterdir() if STEP_FOLDER.fullmatch(path.name)] if home.is_dir() else []
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def begin(out: str | None, resume: str | None) -> Start:
    """Where to begin, from --out and --resume. Reads only.

    Raises:
        ConfigError: RUN holds a run already and --resume does not say what to do with it, or the two do not fit.
        CheckpointError: there is no checkpoint to resume from.
    """
    home = Path(out) if out is not None else None
    if resume == "auto":
        if home is None:
            raise ConfigError("--resume auto needs to know which run to go on with; give its folder with --out")
        return _from_run(home)
    if resume in (None, "none"):
        if home is not None:
            _refuse_overwriting(home, resume)
        return Start(None, None)
    path = Path(resume)
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint or run at {path}; --resume takes auto, none, a run's folder or a checkpoint's")
    is_step = STEP_FOLDER.fullmatch(path.name) is not None
    run = path.resolve().parent.parent if is_step else path
    if home is not None and home.resolve() != run.resolve():
        _refuse_overwriting(home, resume)
    elif home is not None and is_step and checkpoints(home)[-1].name != path.name:
        raise ConfigError(f"{home} has later checkpoints than {path.name}; branch off from it with another --out")
    return Start(path, read_config(run)) if is_step else _from_run(run)


def begin_again(out: str, resume: str | None) -> Start:
    """Where ranks begin that were started again after one was lost: from the newest checkpoint of this very run, if there is one by now.

    Raises:
        ConfigError, CheckpointError: as `begin`.
    """
    if checkpoints(Path(out)):
        return begin(out, "auto")
    return begin(out, resume if resume not in (None, "auto") else "none")


def _from_run(run: Path) -> Start:
    if not run.is_dir():
        raise CheckpointError(f"there is no run at {run} to resume; leave --resume out to start one there")
    if not checkpoints(run):
        raise CheckpointError(f"{run} has no checkpoint to resume from (the run ended before its first one); "
                              "start it over with --resume none, and --save-every for an earlier checkpoint")
    saved = read_config(run)
    if saved is None:
        raise ConfigError(f"{run / 'config.json'} is missing, so the model's options are not known; restore the file, or start anew with "
                          "another --out")
    return Start(run / "checkpoints", saved)


def _refuse_overwriting(run: Path, resume: str | None) -> None:
    """Raise unless `run` is free, or holds no checkpoint and `--resume none` says to start it over."""
    if run.exists() and not run.is_dir():
        raise ConfigError(f"{run} is a file; --out needs a folder")
    if checkpoints(run):
        raise ConfigError(f"{run} already holds a run with checkpoints; go on with it with --resume auto, or choose another --out")
    if resume is None and any((run / name).exists() for name in ("config.json", "log.jsonl")):
        raise ConfigError(f"{run} already holds a run (without a checkpoint); start it over with --resume none, or choose another --out")


def read_config(run: Path) -> dict | None:
    """The options a run was started with, or None when its folder has none.

    Raises:
        ConfigError: the file cannot be read, or is something else.
    """
    path = run / "config.json"
    if not path.exists():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if config["format"] != FORMAT or not isinstance(config["options"], dict):
            raise ValueError(f"format {config['format']!r}")
        return config["options"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot use {path} ({type(error).__name__}: {error}); repair it, or move it away and give the options "
                          "again") from error


def set_aside_after(home: Path, step: int) -> list[Path]:
    """Rename the checkpoints under `home` that are later than `step` (they were too damaged to load), so that the run may write
    those steps again; returns their new paths. Nothing is deleted."""
    moved = []
    for path in checkpoints(home.parent):
        if int(path.name.removeprefix("step-")) > step:
            number = next(n for n in itertools.count(1) if not (home / f"damaged-{n}-{path.name}").exists())
            moved.append(path.rename(home / f"damaged-{number}-{path.name}"))
    return moved


class Run:
    """A run's folder, open for writing by rank 0 and locked against a second run for as long as the process lives."""

    def __init__(self, path: Path) -> None:
        """Create the folder if need be.

        Raises:
            ConfigError: it cannot be made or written, or another run is using it.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock: IO | None = open(path / "lock", "a")     # noqa: SIM115 (held until the process ends, also when it is killed)
        except OSError as error:
            raise ConfigError(f"cannot write to {path} ({error.strerror}); choose another --out") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another run is writing to {path} right now; wait for it, or choose another --out") from None
        except OSError:                                          # a file system without locks: the user is on their own
            self._lock = None
        self._log: IO | None = None

    def write_config(self, options: dict, **facts) -> None:
        """Write config.json, whole or not at all."""
        text = json.dumps({"format": FORMAT, "options": options, **facts}, indent=2) + "\n"
        self._replace("config.json", text)

    def open_log(self, step: int) -> None:
        """Continue log.jsonl after `step`: later lines go to resumes.jsonl, and a last line that a crash cut short is dropped."""
        lines = read_log(self.path) if step else []
        resumes = [*read_log(self.path, RESUMES), {"step": step, "again": [line for line in lines if line["step"] > step]}] if step else []
        self._replace(RESUMES, "".join(json.dumps(line) + "\n" for line in resumes))
        self._replace("log.jsonl", "".join(json.dumps(line) + "\n" for line in lines if line["step"] <= step))
        self._log = open(self.path / "log.jsonl", "a", encoding="utf-8")      # noqa: SIM115

    def log(self, row: dict) -> None:
        """Append one line; it is in the file when this returns (a killed process loses nothing)."""
        try:
            self._log.write(json.dumps(row) + "\n")
            self._log.flush()
        except OSError as error:
            raise _cannot_write(self.path / "log.jsonl", error) from error

    def close(self) -> None:
        """Close the log and give the folder free."""
        for file in (self._log, self._lock):
            if file is not None:
                with contextlib.suppress(OSError):             # what could not be written has been told already
                    file.close()
        self._log = self._lock = None

    def _replace(self, name: str, text: str) -> None:
        draft = self.path / f".{name}.tmp"
        try:
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, self.path / name)
        except OSError as error:
            raise _cannot_write(self.path / name, error) from error


def _cannot_write(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write {path} ({error.strerror}); free some space or mend the disk, then go on with --resume auto")


def read_log(run: Path, name: str = "log.jsonl") -> list[dict]:
    """The lines of RUN/log.jsonl (or RUN/resumes.jsonl); an unfinished last line is left out.

    Raises:
        ConfigError: a line before the last is damaged.
    """
    path = run / name
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            row["step"] + 0
            rows.append(row)
        except (ValueError, KeyError, TypeError):
            if number < len(lines):
                raise ConfigError(f"line {number} of {path} is damaged; move the file away to go on without it") from None
    return rows
