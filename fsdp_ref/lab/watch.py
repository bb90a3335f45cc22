"""Watch ranks train: loss, memory of every rank and the timeline of the last recorded step, drawn anew while a cell runs.

    view = watch.live(folder)            # shows it; the ranks write the folder with live.Reporter(folder)
    ...the training cell...
    view.stop()

A thread of the notebook's process reads the ranks' files; the ranks know nothing of it. It ends with `stop`, after `limit` seconds, or with
the notebook. This module must never slow a rank: it only reads.
"""

from __future__ import annotations

import html
import os
import threading
from pathlib import Path

import ipywidgets as widgets

from .. import live as reports
from ..errors import FsdpRefError
from ..viz import Picture, step_timeline
from ..viz.progress import progress


class Watch:
    """The view; `refresh` reads and draws once, the thread does so every `every` seconds while something changes."""

    def __init__(self, folder: str | os.PathLike, every: float = 1.0, limit: float = 3600.0) -> None:
        self.folder, self.every, self.limit = Path(folder), every, limit
        self.status, self.now, self.numbers, self.step = (widgets.HTML() for _ in range(4))
        self.view = widgets.VBox([self.status, self.now, self.numbers, self.step])
        self.pictures: dict[str, Picture] = {}
        self._seen: tuple = ()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="fsdp_ref watch", daemon=True)

    def start(self) -> Watch:
        """Begin to watch."""
        self.refresh()
        self._thread.start()
        return self

    def stop(self) -> None:
        """Draw once more and end."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10 * self.every + 10)
        self.refresh()

    def _follow(self) -> None:
        waited = 0.0
        while not self._end.wait(self.every) and waited < self.limit:
            waited += self.every
            self.refresh()

    def refresh(self) -> bool:
        """Read what the ranks told and draw it; False when nothing is new."""
        seen = tuple((path.name, path.stat().st_mtime_ns) for path in sorted(self.folder.glob("rank-*.json")))
        if seen == self._seen:
            if not seen:
                self.status.value = f'<p role="status">no rank has reported to {html.escape(self.folder.name)} yet</p>'
            return False
        self._seen = seen
        try:
            told = reports.read(self.folder)
            self.pictures["now"] = progress(told[0].losses, {status.rank: status.held for status in told})
            rows = reports.last_step(told)
            if rows is not None:
                self.pictures["step"] = step_timeline(rows)
        except FsdpRefError as error:
            self.status.value = f'<p role="alert">{html.escape(str(error))}</p>'
            return False
        self.status.value = f'<p role="status">{html.escape(self.pictures["now"].title)}</p>'
        self.now.value, self.numbers.value = self.pictures["now"].image_html, self.pictures["now"].html
        if rows is not None:
            self.step.value = f"<p>step {rows.meta['step']}</p>{self.pictures['step'].page_html}"
        return True

    def _repr_mimebundle_(self, include=None, exclude=None) -> tuple[dict, dict]:
        """The widgets; without them the last picture, its words and its table."""
        data = dict(self.view._repr_mimebundle_())
        if "now" not in self.pictures:
            return data, {}
        still, metadata = self.pictures["now"]._repr_mimebundle_()
        return {**data, **still}, metadata


def live(folder: str | os.PathLike, *, every: float = 1.0, limit: float = 3600.0) -> Watch:
    """Watch the ranks that report to `folder`, once every `every` seconds, for at most `limit` seconds."""
    return Watch(folder, every, limit).start()
