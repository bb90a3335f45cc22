"""Showing what ranks printed and returned: whole lines, grouped by rank, in rank order, the same on every run."""

from __future__ import annotations

import sys

from IPython import get_ipython
from IPython.display import publish_display_data


def show(rank: int, record) -> None:
    """Show one rank's output of one cell or call. `record` is ipyparallel's metadata of that piece of work."""
    _lines(rank, record["stdout"], sys.stdout)
    _lines(rank, record["stderr"], sys.stderr)
    for content in record["outputs"]:
        _rich(rank, content["data"], content.get("metadata", {}))
    if (result := record["execute_result"]) is not None:
        _rich(rank, result["data"], result.get("metadata", {}))
    sys.stdout.flush()


def _lines(rank: int, text: str | None, stream) -> None:
    for line in (text or "").splitlines():
        print(f"[rank {rank}] {line}", file=stream)


def _rich(rank: int, data: dict, metadata: dict) -> None:
    """Text goes on the rank's own line; a picture or a table is handed to the notebook under a line that names the rank."""
    if set(data) == {"text/plain"} or get_ipython() is None:
        text = data.get("text/plain", "")
        _lines(rank, text if "\n" not in text else "\n" + text, sys.stdout)
        return
    print(f"[rank {rank}]", flush=True)
    publish_display_data(data, metadata)
