"""A picture: the figure, the words for somebody who cannot see it, and the table of its numbers. The three always travel together.

In a notebook a `Picture` shows its PNG with the words as alt text, and then the table. The words stand in the output's metadata, which
nbconvert reads, and in an HTML twin of the image, where alone JupyterLab shows them. This module must never write anything that differs
between two runs with equal input (no dates, no versions).
"""

from __future__ import annotations

import base64
import html
import io
import os
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ..errors import ConfigError
from . import table as tables
from .style import DPI, look

COLOURS = 256           # of the PNG's palette; with 128, fills that cover little were merged with their neighbours


@dataclass
class Picture:
    """What every function of `fsdp_ref.viz` returns.

    Attributes:
        figure: a matplotlib `Figure` that no global state knows of.
        alt: what is shown and the main numbers, in sentences.
        table: the numbers, one dict a row, from heading (with unit) to value.
        title: the picture's heading.
    """

    figure: Figure
    alt: str
    table: tables.Rows
    title: str
    _png: bytes | None = field(default=None, repr=False, compare=False)
    _svg: str | None = field(default=None, repr=False, compare=False)

    def png(self) -> bytes:
        """The figure as PNG bytes, the same bytes for the same input; `alt` stands in its Description."""
        if self._png is None:
            raw, small, words = io.BytesIO(), io.BytesIO(), PngInfo()
            with look():
                self.figure.savefig(raw, format="png", dpi=DPI)
            words.add_itxt("Title", self.title)
            words.add_itxt("Description", self.alt)
            palette = Image.open(raw).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)       # a third of the bytes
            palette.save(small, format="png", optimize=True, pnginfo=words, dpi=(DPI, DPI))
            self._png = small.getvalue()
        return self._png

    def svg(self) -> str:
        """The figure as SVG text, the same for the same input; title and words stand in it, for screen readers and search."""
        if self._svg is None:
            raw = io.StringIO()
            with look(), rc_context({"svg.hashsalt": "fsdp_ref", "svg.fonttype": "none"}):
                self.figure.savefig(raw, format="svg", metadata={"Date": None, "Creator": None})
            text = raw.getvalue()
            begin, end = text.index("<svg"), text.index(">", text.index("<svg"))
            words = f"<title>{html.escape(self.title)}</title>\n<desc>{html.escape(self.alt)}</desc>"
            self._svg = f'{text[begin:end]} role="img">\n{words}{text[end + 1:]}'
        return self._svg

    @property
    def text(self) -> str:
        """Words and table, for a terminal."""
        return f"{self.alt}\n\n{tables.as_text(self.table)}"

    @property
    def markdown(self) -> str:
        """Title, words and table as Markdown."""
        return f"## {self.title}\n\n{self.alt}\n\n{tables.as_markdown(self.table)}\n"

    @property
    def html(self) -> str:
        """The table as HTML, with the title as its caption."""
        return tables.as_html(self.table, self.title)

    @property
    def image_html(self) -> str:
        """The image alone as HTML, with its words as alt text; nothing is loaded from anywhere."""
        return (f'<img alt="{html.escape(self.alt)}" src="data:image/png;base64,{base64.b64encode(self.png()).decode()}" '
                'style="max-width: 100%">')

    @property
    def page_html(self) -> str:
        """Image and table as HTML."""
        return f"{self.image_html}\n{self.html}"

    def save(self, path: str | os.PathLike) -> tuple[Path, Path]:
        """Write `path` (PNG; `.png` is added when missing) and a Markdown file beside it with words and table; returns both paths.

        Raises:
            ConfigError: the folder does not exist or cannot be written.
        """
        picture = Path(path)
        if picture.suffix.lower() != ".png":
            picture = picture.with_name(picture.name + ".png")
        words = picture.with_suffix(".md")
        try:
            picture.write_bytes(self.png())
            words.write_text(self.markdown, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the picture cannot be written to {picture} ({error.strerror}); give a path in a folder that exists"
                              " and may be written") from error
        return picture, words

    def show(self) -> None:
        """Display figure and table in a notebook; print words and table where there is no IPython."""
        try:
            from IPython.display import display
        except ImportError:
            print(self.text)
            return
        data, metadata = self._repr_mimebundle_()
        display({**data, "text/plain": self.alt, "text/html": self.image_html}, metadata=metadata, raw=True)
        display({"text/html": self.html, "text/plain": tables.as_text(self.table)}, raw=True)

    _ipython_display_ = show

    def _repr_mimebundle_(self, include=None, exclude=None) -> tuple[dict, dict]:
        """PNG with alt text, and the words with the table for front ends that show no images."""
        return {"image/png": self.png(), "text/plain": self.text}, {"image/png": {"alt": self.alt}}

    def __repr__(self) -> str:
        return f"Picture({self.title!r}: {self.alt})"
