"""Which files a piece of code opens, heard from Python itself by an audit hook."""

from __future__ import annotations

import os
import sys
from pathlib import Path


class OpenHook:
    """Every path that Python's own open, os.open and os.scandir are given, by an audit hook (which can never be taken away again)."""

    paths: list | None = None
    installed = False

    def __enter__(self):
        if not OpenHook.installed:
            sys.addaudithook(OpenHook.hear)
            OpenHook.installed = True
        OpenHook.paths = []
        return OpenHook.paths

    def __exit__(self, *_):
        OpenHook.paths = None

    @staticmethod
    def hear(event, arguments):
        if OpenHook.paths is not None and event in ("open", "os.scandir") and isinstance(arguments[0], (str, bytes, os.PathLike)):
            OpenHook.paths.append(os.fsdecode(arguments[0]))


def outside(directory: Path, opened: list) -> list[str]:
    """The paths that are neither the directory nor in it; Python's own imports left out."""
    real = os.path.realpath(directory)
    inside = lambda path: path == real or os.path.dirname(path) == real and os.path.basename(path) not in (".", "..")  # noqa: E731
    return [path for path in opened if not inside(path) and not inside(os.path.realpath(path)) and not path.endswith((".py", ".pyc"))]
