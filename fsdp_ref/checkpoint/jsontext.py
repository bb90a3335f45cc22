"""JSON for people, written one way only and read strictly; and Python values that JSON has no word for.

`dump` puts what fits on one line on one line, so a manifest can be read and the same value always gives the same bytes. `parse`
refuses what the standard library would let pass: a name twice, NaN, a byte order mark. `encode` makes tuples, infinities, small
tensors and odd keys into JSON and `decode` brings them back. Nothing here runs code found in a file.
"""

from __future__ import annotations

import json
import math

import torch

from ..errors import CheckpointError

WIDTH = 140
_flat = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode           # made once: json.dumps would make it anew for each call
_TENSOR_LIMIT = 1024     # elements; a larger tensor belongs into a safetensors file


def parse(data: bytes, what: str, *, floats: bool = True) -> object:
    """The value in `data`. `what` names the file in messages. `floats=False` refuses numbers with a point or an exponent.

    Raises:
        CheckpointError: not UTF-8, not JSON, nested too deeply, a name twice in one object, NaN or an infinity.
    """
    def pairs(items: list[tuple[str, object]]) -> dict:
        result = dict(items)
        if len(result) != len(items):
            names = [name for name, _ in items]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the name {twice[:80]!r} stands there twice")
        return result

    def refuse(text: str) -> object:
        raise ValueError(f"the number {text[:80]} is not allowed there")

    def real(text: str) -> float:
        value = float(text)
        return value if math.isfinite(value) else refuse(text)

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=pairs, parse_constant=refuse, parse_float=real if floats else refuse)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} cannot be read ({str(error)[:200]}); restore the checkpoint from a copy") from error


def dump(value: object, indent: str = "") -> str:
    """Indented JSON text, without a newline at the end; an object or a list that fits on a line stays on one."""
    flat = _flat(value)
    if len(indent) + len(flat) <= WIDTH or not isinstance(value, (dict, list)):
        return flat
    inner = indent + "  "
    if isinstance(value, dict):
        rows = [f"{inner}{_flat(name)}: {dump(item, inner)}" for name, item in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + dump(item, inner) for item in value) + f"\n{indent}]"


def encode(value: object, where: str) -> object:
    """`value` as plain JSON. Dictionaries are sorted by name. A name that starts with `$` marks what JSON cannot say.

    >>> encode({"betas": (0.9, 0.999), "limit": float("inf")}, "group 0")
    {'betas': {'$tuple': [0.9, 0.999]}, 'limit': {'$float': 'inf'}}

    Raises:
        CheckpointError: something else, a function say; `where` names the place.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, torch.Tensor):
        return {"$tensor": _encode_tensor(value, where)}
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]}
    if isinstance(value, list):
        return [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict):
        if all(type(name) is str and not name.startswith("$") for name in value):
            return {name: encode(value[name], f"{where}.{name}") for name in sorted(value)}
        return {"$dict": [[encode(name, f"a key of {where}"), encode(item, f"{where}[{name!r}]")] for name, item in value.items()]}
    raise CheckpointError(f"{where} is a {type(value).__name__}, which a checkpoint cannot hold; give numbers, text, lists and tables")


def decode(value: object) -> object:
    """The inverse of `encode`. Raises ValueError, KeyError or TypeError when `value` was not made by it."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tags = [name for name in value if name.startswith("$")]
    if not tags:
        return {name: decode(item) for name, item in value.items()}
    if len(value) != 1:
        raise ValueError(f"{tags[0]} stands beside other names")
    tag, inner = next(iter(value.items()))
    if tag == "$tuple":
        return tuple(decode(item) for item in inner)
    if tag == "$dict":
        return {decode(name): decode(item) for name, item in inner}
    if tag == "$float" and inner in ("nan", "inf", "-inf"):
        return float(inner)
    if tag == "$tensor":
        return _decode_tensor(inner)
    raise ValueError(f"{tag} is no mark of this format")


def _encode_tensor(tensor: torch.Tensor, where: str) -> dict:
    from .safetensors_file import dtype_name
    if tensor.numel() > _TENSOR_LIMIT or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise CheckpointError(f"{where} is a tensor of {tensor.numel()} elements inside a list or an option; only tensors of up to "
                              f"{_TENSOR_LIMIT} elements are saved there, make it optimizer state or a buffer")
    plain = tensor.detach().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"dtype": dtype_name(plain.dtype, where), "shape": list(plain.shape), "bytes": data.hex()}


def _decode_tensor(inner: dict) -> torch.Tensor:
    from .safetensors_file import DTYPES
    data = bytearray.fromhex(inner["bytes"])
    dtype, shape = DTYPES[inner["dtype"]], inner["shape"]
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
