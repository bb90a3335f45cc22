"""The safetensors reader believes nothing: every rule of the format has a file that breaks it."""

import random

import pytest
import safetensors

from fsdp_ref import checkpoint
from fsdp_ref.checkpoint import safetensors_file


def header_of(text: str, data: bytes = b"", pad: bool = True) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    raw += b" " * (-len(raw) % 8) if pad else b""
    return len(raw).to_bytes(8, "little") + raw + data


def tensor(begin: int, end: int) -> str:
    return f'{{"dtype":"U8","shape":[{end - begin}],"data_offsets":[{begin},{end}]}}'


GOOD = '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[],"data_offsets":[8,9]}}'
REFUSED = {
    "nothing": b"",
    "seven bytes": b"\x00" * 7,
    "huge length": (2**63).to_bytes(8, "little") + b"{}",
    "length beyond the end": (100).to_bytes(8, "little") + b"{}",
    "length above the limit": (25_000_001).to_bytes(8, "little") + b"{" + b" " * 25_000_001,
    "no object": header_of("[]"),
    "leading space": header_of(' {"__metadata__":{}}'),
    "byte order mark": header_of("\ufeff{}"),
    "not UTF-8": (8).to_bytes(8, "little") + b'{"\xff":1}',
    "NUL padding": (8).to_bytes(8, "little") + b"{}\0\0\0\0\0\0",
    "trailing text": header_of("{}{}"),
    "the same tensor twice": header_of(f'{{"a":{tensor(0, 0)},"a":{tensor(0, 0)}}}'),
    "the same field twice": header_of('{"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}}', b"1"),
    "metadata twice": header_of('{"__metadata__":{},"__metadata__":{}}'),
    "metadata of numbers": header_of('{"__metadata__":{"a":1}}'),
    "metadata is a list": header_of('{"__metadata__":[]}'),
    "no dtype": header_of('{"a":{"shape":[1],"data_offsets":[0,1]}}', b"1"),
    "a tensor is a number": header_of('{"a":1}'),
    "small letters": header_of('{"a":{"dtype":"u8","shape":[1],"data_offsets":[0,1]}}', b"1"),
    "dtype is a list": header_of('{"a":{"dtype":[],"shape":[1],"data_offsets":[0,1]}}', b"1"),
    "a float in the shape": header_of('{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}', b"1"),
    "an exponent": header_of('{"a":{"dtype":"U8","shape":[1e0],"data_offsets":[0,1]}}', b"1"),
    "a bool in the shape": header_of('{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}', b"1"),
    "NaN": header_of('{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', b"1"),
    "a negative size": header_of('{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}', b"1"),
    "above 2**64": header_of('{"a":{"dtype":"U8","shape":[18446744073709551616,0],"data_offsets":[0,0]}}'),
    "product above 2**64": header_of('{"a":{"dtype":"U8","shape":[1099511627776,1099511627776,0],"data_offsets":[0,0]}}'),
    "three offsets": header_of('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,1]}}', b"1"),
    "backward offsets": header_of('{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}}', b"1"),
    "size and offsets differ": header_of('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,3]}}', b"123"),
    "a hole": header_of(f'{{"a":{tensor(0, 1)},"b":{tensor(2, 3)}}}', b"123"),
    "an overlap": header_of(f'{{"a":{tensor(0, 2)},"b":{tensor(1, 3)}}}', b"123"),
    "a range used twice": header_of(f'{{"a":{tensor(0, 1)},"b":{tensor(0, 1)}}}', b"1"),
    "does not begin at 0": header_of('{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', b"12"),
    "truncated": header_of(GOOD, b"12345678"),
    "bytes behind the end": header_of(GOOD, b"1234567890"),
    "deep nesting": header_of("{" + '"a":[' * 100_000 + "]" * 100_000 + "}"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_reader_refuses(tmp_path, case):
    (tmp_path / "file").write_bytes(REFUSED[case])
    with pytest.raises(checkpoint.CheckpointError, match="file"):
        safetensors_file.read_header(tmp_path / "file")


def test_the_reader_accepts_what_is_legal(tmp_path):
    """Names are text, misalignment and unknown fields are allowed, a zero in front stops the product."""
    text = ('{"":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"note":7},"../x":{"dtype":"F32","shape":[1],"data_offsets":[1,5]},'
            '"z":{"dtype":"U8","shape":[0,1099511627776,1099511627776],"data_offsets":[0,0]}}')
    (tmp_path / "file").write_bytes(header_of(text, b"12345", pad=False))
    header = safetensors_file.read_header(tmp_path / "file")
    assert header.entries["../x"] == safetensors_file.Entry("F32", (1,), 1, 5)
    with safetensors.safe_open(tmp_path / "file", framework="pt") as file:
        assert set(file.keys()) == set(header.entries)


def test_whatever_we_accept_the_library_accepts(tmp_path):
    """Two thousand random changes of a good file."""
    dice = random.Random(5)
    good = header_of(GOOD, b"123456789")
    path, accepted = tmp_path / "file", 0
    for _ in range(2000):
        data = bytearray(good)
        for _ in range(dice.randint(1, 3)):
            data[dice.randrange(len(data))] = dice.choice(b'{}[]":,0123456789eE.-+ FUtrue\x00\xff')
        path.write_bytes(data[:dice.choice((len(data), len(data), dice.randrange(len(data))))])
        try:
            safetensors_file.read_header(path)
        except checkpoint.CheckpointError:
            continue
        accepted += 1
        with safetensors.safe_open(path, framework="pt"):
            pass
    assert accepted > 20
