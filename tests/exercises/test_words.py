"""Each typical mistake has its own sentence, whatever the exercise."""

import pytest
import torch

from fsdp_ref.lab.checks.observe import Event, Evidence, RankEvidence
from fsdp_ref.lab.checks.pictures import beside
from fsdp_ref.lab.checks.words import bound, difference, near

WANT = torch.tensor([[1.0, -2.0], [3.0, 5.0], [0.5, 7.0]])
LOCAL = WANT + torch.tensor([1.0, -3.0])


@pytest.mark.parametrize(("actual", "words"), [
    (WANT * 2, "is exactly 2.00 times the reference: summed, not averaged"),
    (WANT * 4, "is exactly 4.00 times the reference"),
    (WANT / 2, "is exactly 1/2 of the reference: averaged once more than it should be"),
    (LOCAL, "is the un-reduced local gradient"),
    (-WANT, "has the wrong sign everywhere"),
    (torch.zeros(3, 2), "is all zeros"),
    (WANT.roll(1, 0), "has the right pieces, shifted by 1 along the first dimension"),
    (WANT.flip(1), "has the right numbers in another order"),
    (WANT * float("nan"), "holds NaN or infinity"),
    (WANT + torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 0.0]]), "is wrong in 1 of 6 elements, first at element 3"),
    (WANT.bfloat16(), "its dtype is bfloat16 and must be float32"),
    (WANT.flatten(), "its shape is (6,) and must be (3, 2)"),
    (None, "it returned nothing; return the tensor"),
    ([WANT], "it returned a list, not a tensor"),
    ({"other": "generator"}, "it returned a generator, not a tensor"),
])
def test_a_mistake_has_its_words(actual, words):
    found = difference(actual, WANT, what="the gradient", tolerance=1e-6, unlike={"the un-reduced local gradient": LOCAL}, world=2)
    assert found is not None and words in found.words


def test_what_is_right_within_the_bound_is_right():
    parts = torch.randn(1000, 4)
    forward, backward = parts.sum(1), parts.flip(1).sum(1)
    assert difference(backward, forward, tolerance=bound(forward, 4)) is None
    assert not near(forward + 1e-3, forward, bound(forward, 4)) and bound(torch.ones(2, dtype=torch.int64), 9) == 0


def test_bytes_are_those_of_a_ring():
    def event(kind, numel):
        return Event(0, kind, numel=numel, nbytes=4 * numel)
    sent = {kind: event(kind, 12).wire_bytes(4) for kind in ("all_reduce", "reduce_scatter", "all_gather", "barrier", "send", "recv")}
    assert sent == {"all_reduce": 72, "reduce_scatter": 36, "all_gather": 144, "barrier": 0, "send": 48, "recv": 0}
    evidence = Evidence(4, [RankEvidence(value={"a": rank}) for rank in range(4)], [event("all_reduce", 12), event("recv", 0)])
    assert evidence.sent(0) == 72 and evidence.sent(1) == 0 and evidence.values("a") == [0, 1, 2, 3] and evidence.values("b") == [None] * 4


def test_a_picture_of_expected_beside_actual_says_what_differs():
    picture = beside("who holds what", [["0–3"], ["4–7"]], [["0–3"], ["0–3", "4–7"]])
    assert picture.table[0]["the same"] == "yes"
    assert picture.table[1] == {"rank": 1, "expected": "4–7", "yours": "0–3, 4–7", "the same": "no"}
    assert "Different on rank 1." in picture.alt and len(picture.png()) > 1000
    assert "The same on every rank." in beside("same", [["a"]], [["a"]]).alt
    assert beside("nothing yet", [["a"], ["b"]], []).table[1]["yours"] == "nothing"
