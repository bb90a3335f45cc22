"""Messages keep their bits, and nothing that is not of the format is made into anything."""

import json

import pytest
import torch

from fsdp_ref.lab.checks.inside import frames
from fsdp_ref.lab.checks.inside.frames import BadMessage


def back(message):
    data = frames.pack(message)
    text, raw = frames.sizes(data[:frames.HEAD.size])
    body = data[frames.HEAD.size:]
    assert len(body) == text + raw
    return frames.unpack(body[:text], body[text:])


@pytest.mark.parametrize("dtype", frames.DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)], ids=str)
def test_a_tensor_keeps_its_bits(dtype, shape):
    tensor = (torch.rand(shape) * 9).to(dtype)
    found = back({"a": [tensor, 1]})["a"][0]
    assert found.dtype == dtype and found.shape == tensor.shape and torch.equal(found, tensor)


def test_views_and_gradients_travel_as_plain_tensors():
    tensor = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
    found = back([tensor, None, True, 1.5, "x", {"k": (1, 2)}, object(), float("inf")])
    assert torch.equal(found[0], tensor) and not found[0].requires_grad
    assert found[1:6] == [None, True, 1.5, "x", {"k": [1, 2]}] and found[6] == {"other": "object"} and found[7] == float("inf")


@pytest.mark.parametrize("described", [
    ["float32", [2], 0, 4], ["float32", [2], 0, 80], ["float32", [-2], 0, 8], ["float32", [2.0], 0, 8], ["float32", [True, 2], 0, 8],
    ["object", [1], 0, 8], ["float32", [2**30, 2**30], 0, 8], ["float32", [1] * 9, 0, 4], ["float32", [1], 4, 0], ["float32"], None, 5,
    ["float32", "ab", 0, 8], [["x"], [1], 0, 4],
])
def test_impossible_tensors_are_refused(described):
    with pytest.raises(BadMessage):
        frames.unpack(json.dumps({"tensor": described}).encode(), bytes(8))


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"1" * 10_000])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(BadMessage):
        frames.unpack(text, b"")


def test_too_large_is_refused_before_it_is_read():
    with pytest.raises(BadMessage, match="over the limits"):
        frames.sizes(frames.HEAD.pack(2**31, 0))
    with pytest.raises(BadMessage):
        frames.sizes(frames.HEAD.pack(10, 2**40))
