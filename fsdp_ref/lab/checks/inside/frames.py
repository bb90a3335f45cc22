"""Messages between judge and ranks: JSON and the raw bytes of tensors, nothing that could run.

    4 bytes: length of the JSON     8 bytes: length of the raw part     the JSON     the raw part

A tensor in a message becomes {"tensor": [dtype, shape, begin, end]} with its bytes in the raw part. Both sides use this module; `unpack`
must never trust what it reads: sizes, dtypes and depth are checked before anything is made.
"""

from __future__ import annotations

import json
import math
import struct

import torch

HEAD = struct.Struct("!IQ")
JSON_LIMIT, RAW_LIMIT = 2**20, 2**24
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)}
_uint8, _dumps, _loads = torch.uint8, json.dumps, json.loads
_contiguous, _view, _reshape, _numpy, _detach, _cpu = (torch.Tensor.contiguous, torch.Tensor.view, torch.Tensor.reshape, torch.Tensor.numpy,
                                                       torch.Tensor.detach, torch.Tensor.cpu)


class BadMessage(Exception):
    """A message that no rank of ours would send."""


def pack(message: object) -> bytes:
    """A message of None, bool, int, float, str, list, dict and tensors as bytes."""
    raw: list[bytes] = []
    place = 0

    def plain(value: object) -> object:
        nonlocal place
        if isinstance(value, torch.Tensor):
            flat = _reshape(_contiguous(_cpu(_detach(value))), (-1,))
            data = bytes(_numpy(_view(flat, _uint8))) if flat.numel() else b""
            raw.append(data)
            place += len(data)
            return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), place - len(data), place]}
        if isinstance(value, dict):
            return {str(key): plain(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        return {"other": type(value).__name__}

    text = _dumps(plain(message)).encode()
    body = b"".join(raw)
    return HEAD.pack(len(text), len(body)) + text + body


def sizes(head: bytes) -> tuple[int, int]:
    """The lengths of JSON and raw part.

    Raises:
        BadMessage: one of them is over its limit.
    """
    text, raw = HEAD.unpack(head)
    if text > JSON_LIMIT or raw > RAW_LIMIT:
        raise BadMessage(f"a message of {text} and {raw} bytes is over the limits of {JSON_LIMIT} and {RAW_LIMIT}")
    return text, raw


def unpack(text: bytes, raw: bytes) -> object:
    """The message; tensors own their memory.

    Raises:
        BadMessage: it is no message of this format.
    """
    try:
        return _made(_loads(text), raw)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError, RuntimeError) as error:
        raise BadMessage(f"a message that is none: {type(error).__name__}") from error


def _made(value: object, raw: bytes) -> object:
    if isinstance(value, list):
        return [_made(each, raw) for each in value]
    if isinstance(value, dict):
        if set(value) == {"tensor"}:
            return _tensor(value["tensor"], raw)
        return {key: _made(each, raw) for key, each in value.items()}
    return value


def _tensor(described: object, raw: bytes) -> torch.Tensor:
    name, shape, begin, end = described
    dtype = DTYPES[name]
    if not all(type(number) is int and 0 <= number <= RAW_LIMIT for number in (*shape, begin, end)) or len(shape) > 8:
        raise BadMessage("a tensor with an impossible shape")
    size = torch.empty((), dtype=dtype).element_size()
    if not begin <= end <= len(raw) or math.prod(shape) * size != end - begin:
        raise BadMessage("a tensor whose bytes do not fit its shape")
    if begin == end:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw[begin:end]), dtype=torch.uint8).view(dtype).reshape(shape)
