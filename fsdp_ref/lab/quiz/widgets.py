"""A quiz as ipywidgets: native controls with labels, so that Tab and Space (in lists the arrow keys) work and a screen reader names them.

Each question has its text, its control, a button, and a line in which the verdict is announced (role="status"). A control holds what the
learner may choose, never what is right; judging is `answer`'s work, in the kernel. This module must never look at which answer is right.
"""

from __future__ import annotations

import html
from collections.abc import Callable

import ipywidgets as widgets

from ...errors import ConfigError
from ...quizzes import Bank, Question, Verdict
from ...quizzes.question import LETTERS
from ...quizzes.show import prompt, with_code

WIDE = widgets.Layout(width="98%")         # with its margins it then ends where the output ends
ORDINALS = ("1st", "2nd", "3rd")
STYLE = """<style>.fsdp-ref-quiz .widget-radio-box label, .fsdp-ref-quiz .widget-checkbox label {white-space: normal; height: auto;}
.fsdp-ref-quiz .widget-radio, .fsdp-ref-quiz .widget-radio-box, .fsdp-ref-quiz .widget-checkbox {width: 100%; height: auto;}</style>"""

Answering = Callable[[Question, object], Verdict]


def view(quiz: Bank, answer: Answering) -> widgets.VBox:
    """All questions of a quiz, one below the other, with a line that counts."""
    count = widgets.HTML()
    done: dict[str, bool] = {}

    def tell(verdict: Verdict | None = None) -> None:
        if verdict is not None:
            done[verdict.id] = done.get(verdict.id, False) or verdict.right
        count.value = f'<p role="status">{sum(done.values())} of {len(quiz.questions)} answered right</p>'

    tell()
    left_out = [widgets.HTML(f'<p role="alert">A question was left out: {html.escape(str(problem))}</p>')
                for problem in quiz.problems.values()]
    box = widgets.VBox([widgets.HTML(f"{STYLE}<h4>Quiz {html.escape(quiz.name)}</h4>"),
                        *(one(question, answer, tell) for question in quiz.questions), *left_out, count], layout=WIDE)
    box.add_class("fsdp-ref-quiz")
    return box


def one(question: Question, answer: Answering, tell: Callable[[Verdict], None] = lambda verdict: None) -> widgets.VBox:
    """One question: its text, its control, a button, the place for the verdict."""
    control, given = CONTROLS[question.kind](question)
    button = widgets.Button(description="Check answer", tooltip=f"Check your answer to question {question.id}",
                            layout=widgets.Layout(width="12em"))
    said = widgets.HTML('<p role="status" aria-live="polite"></p>', layout=WIDE)

    def check(_: object) -> None:
        try:
            verdict = answer(question, given())
        except ConfigError as problem:
            said.value = f'<p role="status" aria-live="polite">{html.escape(str(problem))}</p>'
            return
        mark = "✓" if verdict.right else "✗"
        again = "" if verdict.right else " Try again."
        said.value = f'<p role="status" aria-live="polite">{mark} {with_code(str(verdict))}{again}</p>'
        tell(verdict)

    button.on_click(check)
    return widgets.VBox([widgets.HTML(prompt(question), layout=WIDE), control, button, said], layout=WIDE)


def _letter(place: int) -> str:
    return LETTERS[place]


def _radio(question: Question) -> tuple[widgets.Widget, Callable[[], object]]:
    texts = [(f"{_letter(i)}) {answer.text}", _letter(i)) for i, answer in enumerate(question.shown)]
    control = widgets.RadioButtons(options=texts, value=None, description=f"{question.id}, choose one:", layout=WIDE,
                                   style={"description_width": "initial"})

    def given() -> object:
        if control.value is None:
            raise ConfigError(f"{question.id}: nothing is chosen; choose one answer")
        return control.value

    return control, given


def _boxes(question: Question) -> tuple[widgets.Widget, Callable[[], object]]:
    boxes = [widgets.Checkbox(value=False, description=f"{_letter(i)}) {answer.text}", indent=False, layout=WIDE)
             for i, answer in enumerate(question.shown)]

    def given() -> object:
        chosen = [_letter(i) for i, box in enumerate(boxes) if box.value]
        if not chosen:
            raise ConfigError(f"{question.id}: nothing is chosen; choose all answers that are right")
        return chosen

    return widgets.VBox([widgets.Label(f"{question.id}, choose all that are right:"), *boxes], layout=WIDE), given


def _field(question: Question) -> tuple[widgets.Widget, Callable[[], object]]:
    unit = f" ({question.unit})" if question.unit else ""
    control = widgets.Text(description=f"{question.id}, your answer{unit}:", style={"description_width": "initial"},
                           placeholder="a number" if question.kind == "numeric" else "text", layout=widgets.Layout(width="24em"))

    def given() -> object:
        if not control.value.strip():
            raise ConfigError(f"{question.id}: nothing is written; write {'a number' if question.kind == 'numeric' else 'the text'}")
        return control.value

    return control, given


def _places(question: Question) -> tuple[widgets.Widget, Callable[[], object]]:
    choices = [("choose a step", "")] + [(f"{_letter(i)}) {answer.text}", _letter(i)) for i, answer in enumerate(question.shown)]
    lists = [widgets.Dropdown(options=choices, value="", description=f"{ORDINALS[i] if i < 3 else f'{i + 1}th'} step:", layout=WIDE)
             for i in range(len(question.shown))]

    def given() -> object:
        if any(not each.value for each in lists):
            raise ConfigError(f"{question.id}: a place is empty; choose a step for each")
        return [each.value for each in lists]

    return widgets.VBox([widgets.Label(f"{question.id}, put the steps in order:"), *lists], layout=WIDE), given


CONTROLS = {"multiple_choice": _radio, "many_choice": _boxes, "numeric": _field, "string": _field, "order": _places}
