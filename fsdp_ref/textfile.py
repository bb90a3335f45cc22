"""Write a text file whole or not at all: a reader, or a crash half-way, never meets half a ledger, half a trace or half a report.

This module knows nothing of what is written. It must never follow a name that was read from a file.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from .errors import ConfigError


def write(path: str | os.PathLike, text: str, what: str) -> Path:
    """Put `text` (UTF-8) at `path`, in the place of what stood there, by way of a draft beside it; returns the path.

    Raises:
        ConfigError: the folder is missing, full or may not be written; the sentence names the `what` ("the ledger") and the path.
    """
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise ConfigError(f"cannot write {what} {path} ({error.strerror}); give a place that exists and has room") from error
    return path
