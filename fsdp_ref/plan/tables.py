"""Published tables: the files of published/ as rows. Every file begins with `# source: ...`; a file without is refused."""

from __future__ import annotations

import csv
import functools
from importlib import resources

from ..errors import ConfigError
from .quantities import pick


@functools.cache
def names() -> tuple[str, ...]:
    """The tables there are."""
    folder = resources.files(__package__).joinpath("published")
    return tuple(sorted(entry.name.removesuffix(".csv") for entry in folder.iterdir() if entry.name.endswith(".csv")))


@functools.cache
def read(name: str) -> tuple[str, tuple[dict[str, str], ...]]:
    """(source and remarks, rows by column name) of a table.

    Raises:
        ConfigError: no such table, no source, or a row that is not as long as the head.
    """
    path = resources.files(__package__).joinpath("published", f"{pick('published table', name, names())}.csv")
    lines = path.read_text(encoding="utf-8").splitlines()
    remarks = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
    if not remarks or not remarks[0].startswith("source:"):
        raise ConfigError(f"the table {name} does not begin with '# source: ...'; say where its figures come from")
    rows = tuple(csv.DictReader(line for line in lines if not line.startswith("#")))
    if any(None in row or None in row.values() for row in rows):
        raise ConfigError(f"the table {name} has a row that is longer or shorter than its head; mend it")
    return " ".join(remarks).removeprefix("source:").strip(), rows
