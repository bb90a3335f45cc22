"""`check` itself: the card, what it says of an answer, what it refuses; and where a function's text comes from."""

import json

import pytest
import torch

from fsdp_ref.errors import ConfigError
from fsdp_ref.lab.checks import CheckFailed, Submission, check
from fsdp_ref.lab.checks.observe import Evidence, Failure, RankEvidence

OFFSET = 1


def _next(rank, world):
    return (rank + OFFSET) % world


def ring_all_gather(mine, rank, world, send, recv):
    """A right answer that needs a constant, a module and another function of its file."""
    pieces = {rank: mine}
    for step in range(world - 1):
        send(pieces[(rank - step) % world], _next(rank, world))
        pieces[(rank - step - 1) % world] = recv((rank - 1) % world)
    return torch.cat([pieces[source] for source in range(world)])


def test_the_card_says_what_to_write():
    card = check("ring_all_gather")
    assert "def ring_all_gather(mine, rank, world, send, recv):" in str(card) and "5 points" in str(card)
    assert "../exercises/release/ring_all_gather.ipynb" in str(card) and "<pre>def ring_all_gather" in card._repr_html_()


def test_a_function_travels_with_what_it_uses():
    report = check("ring_all_gather", ring_all_gather, seed=1)
    assert report.passed, str(report)
    assert report.require() is report and report.require("bytes") is report
    told = json.loads(report.to_json())
    assert told["score"] == told["points"] == 5 and told["verdicts"]["order"]["passed"] is True and told["seed"] == 1


def test_the_same_text_is_run_once_for_several_graded_cells():
    assert check("ring_all_gather", ring_all_gather) is check("ring_all_gather", ring_all_gather)


def test_what_was_not_done_in_time_is_run_again(monkeypatch):
    runs = []

    def late(submission, exercise, case):
        runs.append(case.title)
        return Evidence(2, [RankEvidence(), RankEvidence()], failure=Failure("time", "it was not done", 0))
    monkeypatch.setattr("fsdp_ref.lab.checks.sandbox.run", late)
    answer = Submission("def ring_all_gather(mine, rank, world, send, recv):\n    return 7\n", "ring_all_gather")
    first, second = check("ring_all_gather", answer), check("ring_all_gather", answer)
    assert len(runs) == 2 and first is not second and first.diagnosis == "it was not done"


def test_a_failed_property_stops_a_graded_cell_with_the_diagnosis():
    text = "import torch\ndef ring_all_gather(mine, rank, world, send, recv):\n    return torch.cat([mine] * world)\n"
    report = check("ring_all_gather", Submission(text, "ring_all_gather"), seed=1)
    with pytest.raises(CheckFailed, match="ring_all_gather, values: rank 0: place 1 holds rank 0's piece"):
        report.require("bytes")
    assert report.score == 0 and report.first.where == "rank 0" and not report.earned("no hang")
    shown = str(report)
    assert "hint 1 of 3" in shown and "FAILED" in shown and "seen with 2 ranks, pieces of 3 float32" in shown
    assert "<table>" in report._repr_html_() and 'alt="' in report._repr_html_()
    assert report.picture.table[1]["the same"] == "no" and "expected rank 0, rank 1" in report.picture.alt


def test_an_exception_is_told_with_its_line():
    text = "def ring_all_gather(mine, rank, world, send, recv):\n    if rank == 1:\n        raise KeyError('lost')\n    return recv(1)\n"
    report = check("ring_all_gather", Submission(text, "ring_all_gather"), seed=1)
    assert "rank 1 raised KeyError: 'lost', at `raise KeyError('lost')`" in report.diagnosis and report.score == 0


@pytest.mark.parametrize(("name", "function", "words"), [
    ("ring_all_gatherer", None, "there is no exercise 'ring_all_gatherer'; choose one of ring_all_gather"),
    ("ring_all_gather", lambda: 0, "a lambda cannot be checked"),
    ("ring_all_gather", 3, "something of type int cannot be checked"),
    ("ring_all_gather", "def f(): pass", "something of type str cannot be checked"),
])
def test_what_cannot_be_checked_is_refused_in_one_sentence(name, function, words):
    with pytest.raises(ConfigError, match=words):
        check(name, function)


def test_a_text_without_the_function_says_so():
    report = check("ring_all_gather", Submission("x = 1\n", "ring_all_gather"), seed=1)
    assert "there is no function ring_all_gather in the answer" in report.diagnosis
    report = check("ring_all_gather", Submission("def ring_all_gather(:\n", "ring_all_gather"), seed=1)
    assert "SyntaxError" in report.diagnosis and "`def ring_all_gather(:`" in report.diagnosis
