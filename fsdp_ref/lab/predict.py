"""A guess before a run, and the measurement beside it afterwards.

    guess = predict("00.peak", "How many times smaller is ZeRO-3's peak?", unit="times")       # a labelled field, and one line of text
    guess.reveal(measured)                                                                      # guess, measurement, a word of verdict

    predict("00.peak", "How many times smaller is ZeRO-3's peak?", unit="times", guess=3)       # the same without a widget

Where no widget can run, the line of text says how to answer. Nothing is saved, nothing is marked. This module must never show a result
before `reveal`, nor anything but the measurement when no guess was made: a notebook that is only run gives the same output every time.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence

import ipywidgets as widgets
from IPython import get_ipython
from IPython.display import display

from ..errors import ConfigError
from ..viz.table import as_html

CLOSE = 0.1             # a guess within a tenth of the measurement is called close
_WIDE = widgets.Layout(width="min(45em, 95%)")


class Prediction:
    """What was asked and what was guessed; `guess` is None until somebody answers, and may be set by the widget or by hand."""

    def __init__(self, name: str, question: str, unit: str, choices: tuple[str, ...]) -> None:
        self.name, self.question, self.unit, self.choices = name, question, unit, choices
        self.guess: float | str | None = None

    @property
    def line(self) -> str:
        """The question as one line of text, with how to answer it."""
        how = "choose: " + " | ".join(self.choices) if self.choices else f"a number{f', in {self.unit}' if self.unit else ''}"
        made = "" if self.guess is None else f" Your guess: {self._tell(self.guess)}."
        return f"Predict {self.name}: {self.question} ({how}){made}"

    def accept(self, answer: object) -> None:
        """Take an answer: one of the choices, or a number (as a number or as text, with the unit or without).

        Raises:
            ConfigError: it is neither; the message says what is wanted.
        """
        if self.choices:
            if str(answer) not in self.choices:
                raise ConfigError(f"{self.name}: {answer!r} is not one of the choices; choose one of {list(self.choices)}")
            self.guess = str(answer)
            return
        text = str(answer).strip().removesuffix(self.unit).strip().replace(",", "")
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(f"{self.name}: {answer!r} is not a number; answer with a number{f' in {self.unit}' if self.unit else ''}, "
                              "such as 3 or 0.5")
        self.guess = number

    def reveal(self, measured: float | str, *, how: str = "measured") -> Revealed:
        """Show the guess beside what was measured: a number in the unit of the question, or one of its choices.

        Args:
            how: the word for it, where it was not measured: `calculated`.

        Raises:
            ConfigError: `measured` is no answer to the question.
        """
        answer = Prediction(self.name, self.question, self.unit, self.choices)
        answer.accept(measured)
        result = Revealed(self.question, None if self.guess is None else self._tell(self.guess), self._tell(answer.guess),
                          self._verdict(answer.guess), how)
        if get_ipython() is None:
            print(result.text)
        else:
            display({"text/plain": result.text, "text/html": result.html}, raw=True)
        return result

    def _tell(self, value: float | str) -> str:
        if isinstance(value, str):
            return value
        number = f"{value:,.0f}" if value == int(value) else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.1f}"
        return f"{number} {self.unit}".strip()

    def _verdict(self, measured: float | str) -> str:
        guess = self.guess
        if guess is None:
            return "no guess was recorded"
        if guess == measured:
            return "right" if self.choices else "exact"
        if self.choices:
            return "otherwise"
        if math.isclose(guess, measured, rel_tol=CLOSE):
            return "close"
        ratio = guess / measured if measured else math.inf
        way = "too high" if guess > measured else "too low"
        return f"{way}, by a factor of {max(ratio, 1 / ratio):.1f}" if 0 < ratio < math.inf else f"{way}, by {abs(guess - measured):.4g}"

    def _ipython_display_(self) -> None:
        """Nothing: `predict` has shown it already, also where it is the last line of a cell."""

    def __repr__(self) -> str:
        return f"<{self.line}>"


class Revealed:
    """Guess and measurement as text; `verdict` is a word or two."""

    def __init__(self, question: str, guess: str | None, measured: str, verdict: str, how: str = "measured") -> None:
        self.question, self.guess, self.measured, self.verdict, self.how = question, guess, measured, verdict, how

    @property
    def text(self) -> str:
        """One line."""
        return f"{self.question} Your guess: {self.guess or 'none'}; {self.how}: {self.measured}; {self.verdict}."

    @property
    def html(self) -> str:
        """The same as a table that a screen reader announces."""
        return as_html([{"your guess": self.guess or "none", self.how: self.measured, "verdict": self.verdict}], self.question)

    def _ipython_display_(self) -> None:
        """Nothing: `reveal` has shown it already."""

    def __repr__(self) -> str:
        return self.text


class Form:
    """The widgets of one prediction: a field (Enter or Tab takes the answer) or radio buttons, and a line that says what was taken."""

    def __init__(self, asked: Prediction) -> None:
        self.asked = asked
        self.status = widgets.HTML()
        if asked.choices:
            self.field = widgets.RadioButtons(options=asked.choices, index=None, description="Your guess", layout=_WIDE)
        else:
            self.field = widgets.Text(description="Your guess", placeholder=f"a number{f', in {asked.unit}' if asked.unit else ''}",
                                      continuous_update=False, layout=_WIDE)
        self.field.tooltip = asked.question
        self.field.observe(self._answered, names="value")
        self.view = widgets.VBox([widgets.HTML(f"<p><b>Predict:</b> {html.escape(asked.question)}</p>"), self.field, self.status])

    def _answered(self, change: dict) -> None:
        if not change["new"]:
            self.asked.guess, self.status.value = None, ""
            return
        try:
            self.asked.accept(change["new"])
            said, role = f"Recorded: {self.asked._tell(self.asked.guess)}.", 'role="status" aria-live="polite"'
        except ConfigError as error:
            self.asked.guess = None
            said, role = str(error), 'role="alert"'
        self.status.value = f"<p {role}>{html.escape(said)}</p>"


def predict(name: str, question: str, *, unit: str = "", choices: Sequence[str] = (), guess: float | str | None = None) -> Prediction:
    """Ask for a guess, before the cell that measures it.

    Args:
        name: `05.bytes`: number of the notebook, a point, a word.
        question: one sentence, with a question mark.
        unit: what the number counts (`times`, `MiB`); of a question without choices.
        choices: the answers to choose from; without them the answer is a number.
        guess: answers at once, without a widget.

    Raises:
        ConfigError: a name, choices or a guess that cannot be used.
    """
    if not re.fullmatch(r"\d\d\.[a-z0-9_]+", name):
        raise ConfigError(f"{name!r} is no name of a prediction; write the notebook's number, a point and a word, such as 05.bytes")
    options = tuple(map(str, choices))
    if len(options) == 1 or len(set(options)) < len(options) or (options and unit):
        raise ConfigError(f"{name}: the choices {list(options)} cannot be used; give two or more that differ, and no unit with them")
    asked = Prediction(name, question, unit, options)
    if guess is not None:
        asked.accept(guess)
    print(asked.line, flush=True)
    if guess is None and getattr(get_ipython(), "kernel", None) is not None:
        display(Form(asked).view)
    return asked
