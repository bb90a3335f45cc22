"""Notebooks from an exercise's source: the cells that all builds share, with the same bytes for the same source.

A notebook carries the id of its exercise in its metadata, for people and tools; graders do not trust it. This module must never
put a solution or a hidden check into a notebook unless its caller names it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from .source import Source, with_stub, without_marks

METADATA = {"kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
            "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python", "pygments_lexer": "ipython3"}}


@dataclass(frozen=True)
class Graded:
    """One graded cell: a property of an exercise, and what it is worth."""

    property: str
    points: int


def graded_line(source: Source, graded: Graded) -> str:
    """What the graders run for one property: the hidden check, a call into the package."""
    return f'require("{source.id}", {source.function}, "{graded.property}")'


GRADED_IMPORT = "from fsdp_ref.exercises.graded import require"


def student_text(role: str, text: str) -> str:
    """A cell's text as a student gets it."""
    return with_stub(text) if role == "answer" else text


def solution_text(role: str, text: str) -> str:
    """A cell's text as the solution shows it."""
    return without_marks(text) if role == "answer" else text


def notebook(source: Source, cells: list):
    """A notebook of these nbformat cells, with cell ids that are counted instead of random, validated."""
    nbformat = library()
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number:02d}"
    made = nbformat.v4.new_notebook(cells=cells, metadata={**METADATA, "fsdp_ref": {"exercise": source.id}})
    made.nbformat_minor = 5
    nbformat.validate(made)
    return made


def markdown(text: str):
    """A Markdown cell."""
    return library().v4.new_markdown_cell(text)


def code(text: str, **metadata):
    """A code cell without outputs."""
    return library().v4.new_code_cell(text, metadata=metadata)


def raw(text: str):
    """A raw cell."""
    return library().v4.new_raw_cell(text)


def as_text(made) -> str:
    """The notebook's bytes as they are written."""
    return library().writes(made) + "\n"


def library():
    """nbformat, which comes with JupyterLab."""
    try:
        import nbformat
    except ImportError:
        raise ConfigError('notebooks need nbformat; install it: pip install "fsdp-ref[lab]"') from None
    return nbformat
