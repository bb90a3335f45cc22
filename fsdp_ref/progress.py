"""What a learner has done, kept in one small file of their own: questions answered, exercises checked.

The file is `progress.json` in the folder that FSDP_REF_DATA names, else in this user's data folder (XDG_DATA_HOME, by default
~/.local/share/fsdp_ref; on macOS ~/Library/Application Support/fsdp_ref). It is written whole or not at all, and one process at a time.
A damaged file is set aside under another name and a new one begun; nothing that a learner does fails because it cannot be noted, so
`record_*` return a sentence where something is to be said. Nothing leaves this machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import textfile
from .errors import ConfigError

FORMAT = "fsdp_ref progress"
PATIENCE = 2.0          # seconds to wait for another notebook that is writing
LIMIT = 16 << 20        # bytes


@dataclass
class Progress:
    """`questions`: id -> {"tries", "right"}; `exercises`: id -> {"score", "points", "tries"} (the best score); `note`: what to tell."""

    questions: dict[str, dict] = field(default_factory=dict)
    exercises: dict[str, dict] = field(default_factory=dict)
    note: str = ""


def learner() -> str:
    """Whose numbers a question has: FSDP_REF_LEARNER, else the name of this account."""
    with contextlib.suppress(KeyError, OSError, ImportError):
        return os.environ.get("FSDP_REF_LEARNER") or getpass.getuser()
    return "learner"


def path() -> Path:
    """Where the file is, whether it exists or not."""
    chosen = os.environ.get("FSDP_REF_DATA")
    if chosen:
        return Path(chosen) / "progress.json"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "fsdp_ref" / "progress.json"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "fsdp_ref" / "progress.json"


def load() -> Progress:
    """What has been done so far; nothing where there is no file. A damaged file is set aside, and `note` says where."""
    place = path()
    try:
        if place.stat().st_size > LIMIT:
            raise ValueError(f"it has more than {LIMIT >> 20} MiB")
        return _parse(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Progress()
    except OSError as error:
        return Progress(note=f"Your progress cannot be read ({error.strerror}: {place}); make the file readable or set FSDP_REF_DATA.")
    except (ValueError, RecursionError) as error:
        return Progress(note=_set_aside(place, error))


def record_answer(question: str, right: bool) -> tuple[int, str]:
    """Note an answer; returns how many this question has had so far, and a sentence where something is to be said."""
    def change(progress: Progress) -> int:
        entry = progress.questions.setdefault(question, {"tries": 0, "right": False})
        entry["tries"] += 0 if entry["right"] else 1            # after the right answer others count no more
        entry["right"] = entry["right"] or right
        return entry["tries"]

    return _change(change)


def record_exercise(exercise: str, score: float, points: float) -> str:
    """Note the score of a check; the best one stays. Returns a sentence where something is to be said."""
    def change(progress: Progress) -> int:
        entry = progress.exercises.setdefault(exercise, {"score": 0.0, "points": points, "tries": 0})
        entry["tries"] += 1
        entry["score"], entry["points"] = max(entry["score"], float(score)), float(points)
        return entry["tries"]

    return _change(change)[1]


def _change(change: Callable[[Progress], int]) -> tuple[int, str]:
    place = path()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _alone(place.with_name(".progress.lock")):
            progress = load()
            count = change(progress)
            data = {"format": FORMAT, "format_version": 1, "questions": progress.questions, "exercises": progress.exercises}
            textfile.write(place, json.dumps(data, indent=1, sort_keys=True) + "\n", "your progress")
            return count, progress.note
    except (OSError, ConfigError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return 0, f"(Not noted in {place}: {reason}; set FSDP_REF_DATA to a folder of yours.)"


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One writer at a time; whoever comes second waits at most PATIENCE seconds."""
    with open(lock, "w") as file:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() > end:
                    raise OSError(error.errno, "another notebook has been writing it for too long") from error
                time.sleep(0.02)
        yield


def _parse(text: str) -> Progress:
    data = json.loads(text)
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("format_version") != 1:
        raise ValueError("it is no progress file of format 1")
    found = Progress(data.get("questions"), data.get("exercises"))
    fits = {"questions": {"tries": int, "right": bool}, "exercises": {"score": (int, float), "points": (int, float), "tries": int}}
    for kind, fields in fits.items():
        entries = getattr(found, kind)
        if not isinstance(entries, dict):
            raise ValueError(f"{kind} is no object")
        for name, entry in entries.items():
            if not isinstance(entry, dict) or any(not isinstance(entry.get(key), type_) for key, type_ in fields.items()):
                raise ValueError(f"the entry {name!r:.40} is not as it was written")
    return found


def _set_aside(place: Path, error: Exception) -> str:
    """Rename a damaged file to a name that is free; returns the sentence about it."""
    number = 1
    while (kept := place.with_name(f"progress.damaged-{number}.json")).exists():
        number += 1
    try:
        os.replace(place, kept)
    except OSError as problem:
        return f"Your progress {place} is damaged ({error}) and cannot be renamed ({problem.strerror}); move it away."
    return f"Your progress was damaged ({error}); it is kept as {kept}, and a new one has begun."
