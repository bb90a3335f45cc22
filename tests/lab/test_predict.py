"""A guess before a run: what is asked, what is taken as an answer, and what is said beside the measurement."""

import ipywidgets
import pytest

from fsdp_ref.errors import ConfigError
from fsdp_ref.lab import predict
from fsdp_ref.lab.predict import Form, Prediction

BITS = dict(choices=["the same bits", "nearly the same", "different"])


def number(guess=None) -> Prediction:
    return predict("00.peak", "How many times smaller is the peak?", unit="times", guess=guess)


@pytest.mark.parametrize(("guess", "measured", "verdict"), [
    (3, 3, "exact"), (3.2, 3, "close"), (6, 3, "too high, by a factor of 2.0"), (1.5, 3, "too low, by a factor of 2.0"),
    (2, 0, "too high, by 2"), (-3, 3, "too low, by 6"), (0, 0, "exact"), (None, 3, "no guess was recorded"), ("3 times", 3, "exact"),
])
def test_the_verdict_on_a_number(guess, measured, verdict):
    assert number(guess).reveal(measured).verdict == verdict


@pytest.mark.parametrize(("guess", "verdict"), [("different", "right"), ("nearly the same", "otherwise"), (None, "no guess was recorded")])
def test_the_verdict_on_a_choice(guess, verdict):
    assert predict("01.bits", "The same bits?", guess=guess, **BITS).reveal("different").verdict == verdict


def test_asking_prints_one_line_that_says_how_to_answer(capsys):
    number()
    asked = capsys.readouterr().out
    assert asked == "Predict 00.peak: How many times smaller is the peak? (a number, in times)\n"
    predict("01.bits", "The same bits?", **BITS)
    assert "(choose: the same bits | nearly the same | different)\n" in capsys.readouterr().out
    number(3)
    assert capsys.readouterr().out.endswith("Your guess: 3 times.\n")


def test_revealing_says_guess_and_measurement_in_text_and_table(capsys):
    shown = number(2.5).reveal(3.4199)
    assert capsys.readouterr().out.endswith(f"\n{shown.text}\n")
    for text in (shown.text, shown.html):
        assert "2.5 times" in text and "3.42 times" in text and "too low" in text
    assert '<th scope="col">your guess</th>' in shown.html and "<caption>How many times" in shown.html


def test_what_was_not_measured_is_not_called_so():
    shown = number(3).reveal(3, how="calculated")
    assert "calculated: 3 times" in shown.text and '<th scope="col">calculated</th>' in shown.html
    assert "measured" not in shown.text + shown.html


def test_without_a_guess_the_output_is_the_same_every_time(capsys):
    outputs = [(number().reveal(3).text, capsys.readouterr().out) for _ in range(2)]
    assert outputs[0] == outputs[1] and "Your guess: none; measured: 3 times" in outputs[0][0]


@pytest.mark.parametrize("text", ["4,096.5 GB", "4096.5", " 4096.5 "])
def test_numbers_may_be_written_with_commas_and_the_unit(text):
    assert predict("03.size", "How many?", unit="GB", guess=text).guess == 4096.5


@pytest.mark.parametrize("answer", ["many", "", "nan", "inf", "3 GB"])
def test_what_is_no_number_is_refused(answer):
    with pytest.raises(ConfigError, match="is not a number; answer with a number in times"):
        number(answer)
    with pytest.raises(ConfigError, match="is not a number"):
        number().reveal(answer)


def test_choices_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError, match="'equal' is not one of the choices; choose one of"):
        predict("01.bits", "The same bits?", guess="equal", **BITS)
    with pytest.raises(ConfigError, match="not one of the choices"):
        predict("01.bits", "The same bits?", **BITS).reveal("equal")


@pytest.mark.parametrize("wrong", [dict(name="peak"), dict(name="5.peak"), dict(choices=["one"]), dict(choices=["a", "a"]),
                                   dict(choices=["a", "b"], unit="MiB")])
def test_a_question_that_cannot_be_asked_is_refused(wrong):
    with pytest.raises(ConfigError, match="; "):
        predict(**{"name": "00.peak", "question": "How many?", **wrong})


def test_the_field_has_a_label_takes_the_keyboard_and_says_what_was_recorded():
    asked = Prediction("00.peak", "How many <times>?", "times", ())
    form = Form(asked)
    assert isinstance(form.field, ipywidgets.Text) and form.field.description == "Your guess" and not form.field.continuous_update
    assert "How many &lt;times&gt;?" in form.view.children[0].value
    form.field.value = "2.5"
    assert asked.guess == 2.5 and "Recorded: 2.5 times." in form.status.value and 'aria-live="polite"' in form.status.value
    form.field.value = "lots"
    assert asked.guess is None and 'role="alert"' in form.status.value and "not a number" in form.status.value
    form.field.value = ""
    assert asked.guess is None and form.status.value == ""


def test_the_choices_are_radio_buttons_with_none_chosen():
    asked = Prediction("01.bits", "The same bits?", "", tuple(BITS["choices"]))
    form = Form(asked)
    assert isinstance(form.field, ipywidgets.RadioButtons) and form.field.value is None and asked.guess is None
    form.field.value = "different"
    assert asked.guess == "different" and "Recorded: different." in form.status.value
    assert form.field.description == "Your guess"
