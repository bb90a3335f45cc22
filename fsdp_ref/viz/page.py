"""Pictures as one web page that needs nothing else: images and looks stand in it, no script, no address is asked for.

Every image has its words, every table its headers, the page its language and headings in order, so that a screen reader finds its way.
This module must never put a name from a ledger into the page without escaping it.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from .picture import Picture

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #111; background: #fff; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
figure { margin: 0 0 1rem; } img { max-width: 100%; height: auto; border: 1px solid #767676; }
figcaption { font-size: 0.9rem; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: bold; padding: 0.3rem 0; }
th, td { border: 1px solid #767676; padding: 0.15rem 0.5rem; text-align: left; }
th { background: #f0f0f0; } a { color: #0b5394; } a:focus, summary:focus, .table:focus { outline: 3px solid #0b5394; }
"""


def page(title: str, facts: Sequence[str], pictures: Mapping[str, Picture], links: Mapping[str, str], *, notes: Sequence[str] = ()) -> str:
    """The page's HTML.

    Args:
        title: the page's heading.
        facts: sentences about the runs, shown as a list.
        pictures: anchor (letters, digits, - and _) -> picture, in order.
        links: text -> file beside the page (a trace, say).
        notes: what could not be drawn, and why.
    """
    text = html.escape
    contents = "".join(f'<li><a href="#{text(name)}">{text(picture.title)}</a></li>' for name, picture in pictures.items())
    lines = ["<!DOCTYPE html>", '<html lang="en">', f'<head><meta charset="utf-8"><title>{text(title)}</title>',
             '<meta name="viewport" content="width=device-width, initial-scale=1">', f"<style>{_STYLE}</style></head>", "<body><main>",
             f"<h1>{text(title)}</h1>", "<ul>", *(f"<li>{text(fact)}</li>" for fact in facts), "</ul>"]
    if notes:
        lines += ["<h2>Not drawn</h2>", "<ul>", *(f"<li>{text(note)}</li>" for note in notes), "</ul>"]
    lines += [f'<nav aria-label="Pictures"><ol>{contents}</ol></nav>']
    lines += [f'<p><a href="{text(file)}">{text(words)}</a></p>' for words, file in links.items()]
    for name, picture in pictures.items():
        heading, alt = text(picture.title), text(picture.alt)
        lines += [f'<section id="{text(name)}"><h2>{heading}</h2>',
                  f"<figure>{picture.image_html}<figcaption>{alt}</figcaption></figure>",
                  f'<div class="table" tabindex="0" role="region" aria-label="Numbers: {heading}">{picture.html}</div></section>']
    return "\n".join([*lines, "</main></body></html>"]) + "\n"
