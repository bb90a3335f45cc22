"""The page to print: course, name, score, id, and a QR code with the signed text. PDF or PNG.

The page proves nothing by itself: whoever receives it checks the QR code's text and compares. This module must never sign anything.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from ..errors import ConfigError
from .record import Certificate

try:
    import segno
    from matplotlib.figure import Figure
except ImportError as error:
    raise ConfigError('certificates need matplotlib and segno; install them with pip install "fsdp-ref[lab]"') from error

SIZE = 11.69, 8.27      # inches: A4, landscape
DPI = 150
QUIET = 4               # modules of white around the code, as its standard asks for
CODE = 0.60, 0.14, 0.30, 0.424   # left, bottom, width, height: a square on the page


def matrix(certificate: Certificate) -> list[list[int]]:
    """The QR code's modules, 1 is dark; with 15 % of them wrong it can still be read."""
    return [list(row) for row in segno.make(certificate.short(), error="m", micro=False).matrix]


def draw(certificate: Certificate) -> Figure:
    """The page as a figure."""
    s = certificate.signed
    figure = Figure(figsize=SIZE, dpi=DPI, facecolor="white")
    exercises = f" in {len(certificate.exercises)} exercises" if certificate.exercises else ""
    lines = [(0.86, 13, "normal", "CERTIFICATE OF COMPLETION"), (0.76, 24, "bold", s["learner"]), (0.685, 12, "normal", "has completed"),
             (0.625, 17, "bold", s["course"])]
    for y, size, weight, text in lines:
        _write(figure, 0.5, y, text, _fitting(text, size), weight, "center")
    below = [(0.49, 13, f"{s['score']:g} of {s['points']:g} points ({100 * s['score'] / s['points']:.0f} %){exercises}"),
             (0.44, 11, f"Issued on {s['issued']}"), (0.36, 11, "Certificate id"), (0.315, 15, s["id"]),
             (0.25, 9, "Scan the code and check its text:"), (0.215, 9, "fsdp-ref certificate verify - --public-key course.pub"),
             (0.18, 9, f"The course's public key has the fingerprint {s['key']}.")]
    for y, size, text in below:
        _write(figure, 0.08, y, text, size, "normal", "left")
    code = matrix(certificate)
    empty = [0] * (len(code) + 2 * QUIET)
    padded = [empty] * QUIET + [[0] * QUIET + row + [0] * QUIET for row in code] + [empty] * QUIET
    axes = figure.add_axes(CODE)
    axes.imshow(padded, cmap="gray_r", interpolation="nearest", aspect="equal")
    axes.set_axis_off()
    return figure


def _write(figure: Figure, x: float, y: float, text: str, size: float, weight: str, align: str) -> None:
    figure.text(x, y, text, fontsize=size, fontweight=weight, ha=align, va="center", color="black", parse_math=False)


def _fitting(text: str, size: float) -> float:
    """A font size with which the line stays on the page."""
    return min(size, SIZE[0] * 72 * 0.86 / (0.62 * max(1, len(text))))


def save(certificate: Certificate, path: Path) -> Path:
    """Write the page whole or not at all; the format follows from the name (.pdf, .png). The same certificate gives the same bytes.

    Raises:
        ConfigError: the folder cannot be written.
    """
    kind = path.suffix[1:]
    words = f"{certificate}. QR code: {certificate.short()}"
    about = {"Title": f"Certificate {certificate.id}"}
    about |= {"Subject": words, "CreationDate": None} if kind == "pdf" else {"Description": words, "Software": None}
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")               # a name in letters that no font here has
            draw(certificate).savefig(draft, format=kind, metadata=about)
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path} ({error.strerror}); give a folder that exists and has room") from error
    return path
