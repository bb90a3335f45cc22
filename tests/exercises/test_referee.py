"""The referee carries messages, sums in rank order, and knows a disagreement and a deadlock at once."""

import pytest
import torch

from fsdp_ref.lab.checks.inside.frames import BadMessage
from fsdp_ref.lab.checks.referee import Referee


def call(op, values, number=1, **more):
    return {"do": "all", "op": op, "number": number, "tensor": torch.tensor(values), **more}


def answers(referee):
    return [[answer["value"] for answer in referee.answers[rank]] for rank in range(referee.world)]


@pytest.mark.parametrize(("op", "more", "want"), [
    ("all_reduce", {"reduce": "sum"}, [[11.0, 22.0], [11.0, 22.0]]),
    ("all_reduce", {"reduce": "avg"}, [[5.5, 11.0], [5.5, 11.0]]),
    ("all_reduce", {"reduce": "max"}, [[10.0, 20.0], [10.0, 20.0]]),
    ("all_reduce", {"reduce": "min"}, [[1.0, 2.0], [1.0, 2.0]]),
    ("all_reduce", {"reduce": "product"}, [[10.0, 40.0], [10.0, 40.0]]),
    ("reduce", {"reduce": "sum", "root": 1}, [[], [11.0, 22.0]]),
    ("broadcast", {"root": 1}, [[10.0, 20.0], [10.0, 20.0]]),
    ("all_gather", {}, [[1.0, 2.0, 10.0, 20.0]] * 2),
    ("gather", {"root": 0}, [[1.0, 2.0, 10.0, 20.0], []]),
    ("reduce_scatter", {"reduce": "sum"}, [[11.0], [22.0]]),
    ("all_to_all", {}, [[1.0, 10.0], [2.0, 20.0]]),
    ("scatter", {"root": 1}, [[10.0], [20.0]]),
])
def test_a_collective(op, more, want):
    referee = Referee(2)
    referee.hear(1, call(op, [10.0, 20.0], **more))
    assert not any(answers(referee)), "nobody gets anything before all have come"
    referee.hear(0, call(op, [1.0, 2.0], **more))
    assert [[value.tolist() for value in each] for each in answers(referee)] == [[each] for each in want]


@pytest.mark.parametrize(("mine", "theirs", "words"), [
    (call("all_reduce", [1.0], reduce="sum"), call("broadcast", [1.0], root=0), "another operation at collective number 1"),
    (call("all_reduce", [1.0], reduce="sum"), call("all_reduce", [1.0], reduce="avg"), "another reduction"),
    (call("all_reduce", [1.0], reduce="sum"), call("all_reduce", [1], reduce="sum"), "another dtype"),
    (call("all_reduce", [1.0], reduce="sum"), call("all_reduce", [1.0, 2.0], reduce="sum"), "another size"),
    (call("broadcast", [1.0], root=0), call("broadcast", [1.0], root=1), "another root"),
])
def test_a_disagreement_is_told_when_the_second_comes(mine, theirs, words):
    referee = Referee(3)
    referee.hear(0, mine)
    assert not referee.over
    referee.hear(2, theirs)
    failure = referee.evidence.failure
    assert referee.over and failure.kind == "mismatch" and failure.rank == 2
    assert words in failure.words and "rank 0 calls" in failure.words and "rank 2 calls" in failure.words


def test_messages_are_matched_in_order():
    referee = Referee(2)
    for number, value in ((1, 5.0), (2, 6.0)):
        referee.hear(0, {"do": "send", "peer": 1, "number": number, "tensor": torch.tensor([value])})
    for number in (1, 2):
        referee.hear(1, {"do": "recv", "peer": 0, "number": number})
    assert [(answer["number"], answer["value"].item()) for answer in referee.answers[1]] == [(1, 5.0), (2, 6.0)]
    assert [str(event) for event in referee.evidence.events] == ["send to 1 1", "send to 1 1", "recv from 0", "recv from 0"]


def test_a_deadlock_is_known_when_the_last_waits():
    referee = Referee(2)
    for rank in (0, 1):
        referee.hear(rank, {"do": "recv", "peer": 1 - rank, "number": 1})
    referee.hear(0, {"do": "wait", "number": 1})
    referee.look()
    assert not referee.over
    referee.hear(1, {"do": "wait", "number": 1})
    referee.look()
    assert referee.evidence.failure.kind == "deadlock"
    assert "rank 0 waits for a message from rank 1; rank 1 waits for a message from rank 0" in referee.evidence.failure.words


def test_waiting_for_one_that_returned_is_a_deadlock_that_says_so():
    referee = Referee(3)
    referee.hear(2, {"do": "result", "value": None})
    for rank in (0, 1):
        referee.hear(rank, call("barrier", [], reduce=""))
        referee.hear(rank, {"do": "wait", "number": 1})
    referee.look()
    assert "collective number 1 (barrier); rank 1 waits" in referee.evidence.failure.words
    assert referee.evidence.failure.words.endswith("; rank 2 returned already")


def test_an_answer_ends_the_wait():
    referee = Referee(2)
    referee.hear(0, {"do": "recv", "peer": 1, "number": 1})
    referee.hear(0, {"do": "wait", "number": 1})
    referee.hear(1, {"do": "send", "peer": 0, "number": 1, "tensor": torch.ones(1)})
    referee.hear(1, {"do": "recv", "peer": 0, "number": 2})
    referee.hear(1, {"do": "wait", "number": 2})
    referee.look()
    assert not referee.over, "rank 0 may still send"


def test_after_an_exception_the_others_are_not_the_story():
    referee = Referee(2)
    referee.hear(0, {"do": "recv", "peer": 1, "number": 1})
    referee.hear(0, {"do": "wait", "number": 1})
    referee.hear(1, {"do": "error", "type": "KeyError", "text": "x", "line": 3, "code": "raise"})
    referee.look()
    assert referee.over and referee.evidence.failure is None


@pytest.mark.parametrize("message", [
    None, 7, {}, {"do": 3}, {"do": "conclude"}, {"do": "all", "op": "cheat", "number": 1}, {"do": "all", "op": "all_reduce", "number": 1},
    {"do": "send", "peer": 2, "number": 1, "tensor": torch.ones(1)}, {"do": "send", "peer": True, "number": 1, "tensor": torch.ones(1)},
    {"do": "recv", "peer": -1, "number": 1}, {"do": "recv", "peer": 0}, {"do": "recv", "peer": 0, "number": "1"},
])
def test_what_no_rank_sends_is_refused(message):
    with pytest.raises(BadMessage):
        Referee(2).hear(0, message)


def test_nothing_is_heard_after_the_end():
    referee = Referee(2)
    referee.hear(0, {"do": "result", "value": 1})
    with pytest.raises(BadMessage):
        referee.hear(0, {"do": "result", "value": 2})
    assert referee.evidence.ranks[0].value == 1
