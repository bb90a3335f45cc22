"""The small table that follows every picture: a list of rows, each a dict from heading to value, as text, Markdown or HTML.

The values stay numbers (tests and reports read them); only the text forms round. This module must never put a name from a ledger
into HTML or Markdown without escaping it.
"""

from __future__ import annotations

import html

from .units import figures

Rows = list[dict[str, object]]


def cell(value: object) -> str:
    """One value as text; None (nothing to measure) is a dash."""
    if value is None:
        return "–"
    return figures(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def headings(rows: Rows) -> list[str]:
    """The headings of all rows, in the order in which they first appear."""
    return list(dict.fromkeys(heading for row in rows for heading in row))


def as_text(rows: Rows) -> str:
    """Columns padded with spaces, numbers to the right."""
    columns = headings(rows)
    grid = [columns] + [[cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in grid) for i in range(len(columns))]
    right = [_is_number(rows, column) for column in columns]
    lines = ["  ".join(text.rjust(w) if r else text.ljust(w) for text, w, r in zip(line, widths, right, strict=True)).rstrip()
             for line in grid]
    return "\n".join(lines)


def as_markdown(rows: Rows) -> str:
    """A pipe table."""
    columns = headings(rows)
    line = lambda texts: "| " + " | ".join(text.replace("\\", "\\\\").replace("|", "\\|") for text in texts) + " |"  # noqa: E731
    rule = "|" + "|".join("---:" if _is_number(rows, column) else "---" for column in columns) + "|"
    return "\n".join([line(columns), rule] + [line([cell(row.get(column)) for column in columns]) for row in rows])


def as_html(rows: Rows, caption: str) -> str:
    """A table with a caption and column headers that a screen reader announces."""
    columns = headings(rows)
    head = "".join(f'<th scope="col">{html.escape(column)}</th>' for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell(row.get(column)))}</td>" for column in columns) + "</tr>" for row in rows)
    return f"<table><caption>{html.escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _is_number(rows: Rows, column: str) -> bool:
    values = [row[column] for row in rows if row.get(column) is not None]
    return bool(values) and all(isinstance(value, int | float) for value in values)
