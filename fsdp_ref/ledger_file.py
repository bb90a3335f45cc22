"""The ledger's file: one JSON object a run, checked field by field when it is read, so that a picture never meets a row that cannot be.

    {"format": "fsdp_ref ledger 1", "start": 0.0, "end": 0.42, "meta": {...}, "events": [{...}], "allocations": [{...}], "shards": [{...}]}

Rows are the dataclasses of rows.py, one object each. A field that has a default may be missing (older files have fewer); an unknown field
is refused. This module must never guess: what is wrong is named, with the number of its row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields
from typing import Any

from .errors import FsdpRefError
from .rows import Allocation, Category, Event, Lane, Shard

FORMAT = "fsdp_ref ledger 1"
KINDS: dict[str, type] = {"events": Event, "allocations": Allocation, "shards": Shard}
_LANES, _CATEGORIES = frozenset(map(str, Lane)), frozenset(map(str, Category))


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _moment(value: Any) -> bool:
    return value is None or _number(value)


def _text(value: Any) -> bool:
    return type(value) is str


def _shape(value: Any) -> bool:
    return type(value) in (list, tuple) and all(map(_count, value))


# what each field may hold; the words complete "..., which is no ..."
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "rank": (_count, "rank"), "lane": (lambda v: v in _LANES, f"lane ({', '.join(Lane)})"), "name": (_text, "text"), "unit": (_text,
                                                                                                                              "text"),
    "phase": (_text, "text"), "start": (_number, "finite number of seconds"), "end": (_moment, "finite number of seconds"),
    "bytes": (_count, "number of bytes"), "group_size": (lambda v: type(v) is int and v >= 1, "size of a group"),
    "sequence": (lambda v: type(v) is int and v >= -1, "sequence number"), "on_wire": (_moment, "finite number of seconds"),
    "leader": (lambda v: type(v) is int and v >= -1, "rank"), "category": (lambda v: v in _CATEGORIES, f"category ({', '.join(Category)})"),
    "shape": (_shape, "list of sizes"), "dtype": (_text, "text"), "offset": (_count, "row number"), "rows": (_count, "number of rows"),
    "padded_rows": (_count, "number of rows"), "dim": (_count, "dim"),
}


def as_json(ledger: Any) -> dict:
    """Plain lists and numbers, for `json.dump`."""
    rows = {kind: [asdict(row) for row in getattr(ledger, kind)] for kind in KINDS}
    return {"format": FORMAT, "start": ledger.start, "end": ledger.end, "meta": ledger.meta, **rows}


def rows_of(data: Any) -> dict[str, Any]:
    """The fields of a `Ledger` from what `as_json` made.

    Raises:
        FsdpRefError: it is no ledger, or a row cannot be; the message names the row, the field and the value.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise FsdpRefError("this is not a ledger of fsdp_ref (format 1); record one with fsdp-ref train --ledger")
    for name, good in (("start", _number), ("end", _number), ("meta", lambda v: isinstance(v, dict)), *((k, _is_list) for k in KINDS)):
        if not good(data.get(name)):
            raise FsdpRefError(f"the ledger's {name!r} is {_short(data.get(name))}, which cannot be; record it again")
    found: dict[str, Any] = {kind: [_row(cls, row, f"{kind[:-1]} {i}") for i, row in enumerate(data[kind])] for kind, cls in KINDS.items()}
    return found | {"start": float(data["start"]), "end": float(data["end"]), "meta": dict(data["meta"])}


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _row(cls: type, row: Any, which: str) -> Any:
    if not isinstance(row, dict):
        raise FsdpRefError(f"the ledger's {which} is {_short(row)}, not a row; record it again")
    wanted = _FIELDS[cls]
    for name, value in row.items():
        if name not in wanted:
            raise FsdpRefError(f"the ledger's {which} has a field {_short(name)} that no row has; read it with a newer version")
        good, kind = _CHECKS[name]
        if not good(value):
            raise FsdpRefError(f"the ledger's {which} has {name} = {_short(value)}, which is no {kind}; record it again")
    if missing := [name for name, needed in wanted.items() if needed and name not in row]:
        raise FsdpRefError(f"the ledger's {which} has no {missing[0]!r}; record it again")
    made = cls(**row) if cls is not Shard else cls(**{**row, "shape": tuple(row["shape"])})
    _fits(made, which)
    return made


_FIELDS = {cls: {f.name: f.default is MISSING for f in fields(cls)} for cls in KINDS.values()}


def _fits(row: Event | Allocation | Shard, which: str) -> None:
    """What the fields of one row must be to each other."""
    if isinstance(row, Shard):
        length = row.shape[row.dim] if row.dim < len(row.shape) else 1
        if row.rows and row.offset + row.rows > length:
            raise FsdpRefError(f"the ledger's {which} holds rows {row.offset} to {row.offset + row.rows} of {length} of "
                               f"{_short(row.name)}; record it again")
    elif row.end is not None and row.end < row.start or isinstance(row, Event) and row.end is None:
        raise FsdpRefError(f"the ledger's {which} ends at {row.end}, before it starts at {row.start}; record it again")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
