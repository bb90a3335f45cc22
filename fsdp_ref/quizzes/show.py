"""Questions as text and as static HTML: what a terminal, a screen reader, nbconvert and a code host show. Answers are never in them."""

from __future__ import annotations

import html
import re
import textwrap

from .bank import Bank
from .question import LETTERS, Question

WIDTH = 100
HOW = {"multiple_choice": "one letter", "many_choice": "all letters that are right, such as \"ac\"", "numeric": "a number",
       "string": "the text", "order": "the letters in the right order, such as \"bca\""}
EXAMPLE = {"multiple_choice": '"b"', "many_choice": '"ac"', "numeric": "2.5", "string": '"..."', "order": '"bca"'}


def how(question: Question) -> str:
    """What is asked for: one letter, a number, ..."""
    return HOW[question.kind] + (f" ({question.unit})" if question.unit else "")


def call(question: Question) -> str:
    """How the question is answered in plain Python."""
    return f'ask("{question.id}", answer={EXAMPLE[question.kind]})'


def text(question: Question) -> str:
    """One question, readable without colours, widgets or a wide screen."""
    lines = textwrap.wrap(f"{question.id}  {question.text}", WIDTH, subsequent_indent="    ")
    if question.code:
        lines += ["", *(f"    {line}" for line in question.code.splitlines()), ""]
    for letter, answer in zip(LETTERS, question.shown, strict=False):
        lines += textwrap.wrap(f"{letter}) {answer.text}", WIDTH, initial_indent="    ", subsequent_indent="       ")
    return "\n".join([*lines, f"    answer with {how(question)}: {call(question)}"])


def quiz_text(bank: Bank) -> str:
    """All questions of a quiz, and a line for each that cannot be used."""
    parts = [f"Quiz {bank.name}: {len(bank.questions)} questions", *(text(question) for question in bank.questions)]
    return "\n\n".join([*parts, *(f"A question was left out: {problem}" for problem in bank.problems.values())])


def in_html(question: Question) -> str:
    """The same question as HTML: its text, its code, and the answers as a lettered list."""
    below = f"<p>Answer with {html.escape(how(question))}: <code>{html.escape(call(question))}</code></p>"
    return prompt(question) + _choices(question) + below


def prompt(question: Question) -> str:
    """The question's text and code alone, as HTML."""
    code = f"<pre><code>{html.escape(question.code)}</code></pre>" if question.code else ""
    return f"<p><strong>{question.id}</strong> {with_code(question.text)}</p>{code}"


def with_code(words: str) -> str:
    """Text as HTML: what stands between backticks as code, what stands between stars emphasised."""
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(words, quote=False))
    return re.sub(r"(?<!\*)\*([^*\s][^*]*)\*(?!\*)", r"<em>\1</em>", marked)


def quiz_html(bank: Bank) -> str:
    """All questions of a quiz as HTML."""
    left_out = "".join(f"<p>A question was left out: {html.escape(str(problem))}</p>" for problem in bank.problems.values())
    return f"<h4>Quiz {html.escape(bank.name)}</h4>" + "".join(in_html(question) for question in bank.questions) + left_out


def _choices(question: Question) -> str:
    if not question.shown:
        return ""
    return '<ol type="a">' + "".join(f"<li>{html.escape(answer.text)}</li>" for answer in question.shown) + "</ol>"
