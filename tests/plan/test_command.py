"""`fsdp-ref plan` and its actions, as a user types them; sliders move a pure function."""

import sys
from pathlib import Path

import pytest

from fsdp_ref import cli
from fsdp_ref.plan import controls as panel


def told(capsys, *argv):
    code = cli.main(["plan", *argv])
    streams = capsys.readouterr()
    return code, streams.out, streams.err


def test_the_itemised_table_and_the_advice(capsys):
    code, out, _ = told(capsys, "--model", "llama3.1-8b", "--gpus", "8", "--gpu", "h100", "--batch", "64")
    assert code == 0
    for word in ("what one rank holds", "sharded parameter", "activations", "not included", "a step's time", "ruled out", "GiB", "GB"):
        assert word in out, word


def test_one_strategy_without_a_search(capsys):
    code, out, _ = told(capsys, *"--model gpt2 --gpus 4 --gpu a100 --stage zero2 --micro-batch 4 --batch 32".split())
    assert code == 0 and "it fits" in out and "zero2 over 4, 2 x 4 sequences a rank" in out and "ruled out" not in out
    code, out, _ = told(capsys, "--model", "llama3.1-70b", "--gpus", "8", "--stage", "zero3")
    assert "it does not fit" in out


def test_failures_and_prices(capsys):
    _, out, _ = told(capsys, *"--model llama3.1-8b --gpus 64 --gpu p4d --batch 64 --price 4 --mtbf-hours 24 --goal cost".split())
    assert "failures: checkpoint every" in out


@pytest.mark.parametrize(("argv", "words"), [
    (["validate", "--table", "bubbles"], "24 of 24 figures agree"), (["hardware"], "three traps"), (["hardware", "p4d"], "whole node"),
    (["models"], "405,853,388,800"), (["pipeline", "1f1b"], "bubble / ideal 37.5 %, bubble / total 27.3 %"),
    (["pipeline", "interleaved", "--chunks", "2", "--send", "0.1"], "interleaved, 4 ranks"),
    (["partition", "--model", "llama3.1-70b", "--stages", "4", "--gpu", "h100"], "NO"),
])
def test_the_other_actions(capsys, argv, words):
    code, out, err = told(capsys, *argv)
    assert code == 0 and words in out, err


@pytest.mark.parametrize(("argv", "words"), [
    (["--model", "lama3.1-8b"], "no model 'lama3.1-8b'; did you mean llama3.1-8b"),
    (["--model", "gpt2", "--gpu", "h1000"], "no GPU or machine 'h1000'"),
    (["--model", "gpt2", "--gpus", "6", "--tensor", "4"], "cannot be cut into groups"),
    (["--model", "gpt2", "--gpus", "8", "--stage", "ddp", "--batch", "12"], "a batch of 12 sequences does not divide"),
    (["--model", "gpt2", "--gpus", "-8"], "gpus is -8"), (["--gpus", "8"], "required: --model"),
    (["validate", "--table", "bubles"], "did you mean bubbles"), (["calibrate", "--ranks", "1"], "needs 2 ranks"),
    (["--model", "gpt2", "--hardware", "no-such-file"], "cannot read the hardware file"),
])
def test_a_mistake_is_one_line_and_exit_code_2(capsys, argv, words):
    code, out, err = told(capsys, *argv)
    assert code == 2 and not out and words in err and err.count("\n") == 1


def test_validate_fails_when_a_figure_does(capsys, monkeypatch):
    from fsdp_ref.plan import validate
    from fsdp_ref.plan.checks import Check
    monkeypatch.setattr(validate, "checks", lambda: (Check("bubbles", "x", 1.0, 2.0),))
    assert told(capsys, "validate")[0] == 1


def test_a_slider_is_answered_with_text_whatever_it_says():
    assert "MFU" in panel.answer("llama3.1-405b", gpus=16384, tensor=8, pipeline=16, micro_batches=16)
    assert "not possible: " in panel.answer("gpt2", gpus=8, tensor=8) and "DOES NOT FIT" in panel.answer("llama3.1-70b")


def test_widgets_show_the_same_answer_and_follow():
    box = panel.sliders("gpt2", "a100", 4)
    *controls, shown = box.children
    assert "fits" in shown.value and "gpt2" in shown.value
    by_name = {control.description: control for control in controls}
    by_name["model"].value = "llama3.1-70b"
    assert "DOES NOT FIT" in shown.value
    by_name["GPUs"].value = 256
    assert "256 GPUs" in shown.value


def test_without_widgets_the_text_stands(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert panel.sliders("gpt2", "a100", 4) is None and "what one rank holds" in capsys.readouterr().out


def test_every_name_of_the_planner_is_what_it_says_whatever_was_imported_before():
    """A module of the same name would take a function's place as soon as it is imported."""
    import fsdp_ref.plan as plan
    names = {path.stem for path in Path(plan.__file__).parent.glob("*.py")}
    assert not names & set(plan.__all__)
