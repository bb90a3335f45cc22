"""Ways to ruin a checkpoint, each drawn at random and each a real change: what means the same by design is never made.

A corruption is a table of files to put in place of the good ones: name -> bytes, or None to take the file away. Sealed ones are
consistent as someone makes them who knows the format: sizes, digests and the manifest's own digest are right, and only what the files
say can give them away. Left out by construction, because they change nothing that a loader may rely on or only what nobody could know:
the order of entries, digests of single tensors (they explain, see diagnosis), and sealed changes of free values (weights themselves,
learning rates, `extra`, scheduler and loader state) that another run could have written just so.
"""

from __future__ import annotations

import copy
import itertools
import json
import random

from fsdp_ref.checkpoint.files import digest_bytes
from fsdp_ref.checkpoint.manifest import seal

MANIFEST = "manifest.json"
Overlay = dict[str, bytes | None]
FREE = ({"scheduler"}, {"loader"}, {"extra"}, {"optimizer", "values"})       # subtrees that a sealed change may fill as it likes


def files_of(good: dict[str, bytes]) -> list[str]:
    """The files beside the manifest."""
    return sorted(good.keys() - {MANIFEST})


def sealed(good: dict[str, bytes], overlay: Overlay, value: dict | None = None) -> Overlay:
    """The overlay with a manifest that states its sizes and digests."""
    value = copy.deepcopy(value) if value is not None else manifest_of(good)
    for name, data in overlay.items():
        value["files"][name] = {"bytes": len(data), "digest": digest_bytes(data)}
    return {**overlay, MANIFEST: seal(value)}


def manifest_of(good: dict[str, bytes]) -> dict:
    value = json.loads(good[MANIFEST])
    value.pop("digest")
    return value


# -- blind damage -------------------------------------------------------------------------------------------------------------


def flip(dice: random.Random, good: dict[str, bytes]) -> Overlay:
    name = dice.choice(sorted(good))
    data = bytearray(good[name])
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return {name: bytes(data)}


def overwrite(dice, good):
    """Some bytes in a row, each by another."""
    name = dice.choice(sorted(good))
    data = bytearray(good[name])
    begin = dice.randrange(len(data))
    for place in range(begin, min(len(data), begin + dice.randint(1, 64))):
        data[place] = (data[place] + dice.randrange(1, 256)) % 256
    return {name: bytes(data)}


def truncate(dice, good):
    name = dice.choice(sorted(good))
    return {name: good[name][:dice.randrange(len(good[name]))]}


def append(dice, good):
    name = dice.choice(sorted(good))
    return {name: good[name] + dice.choice((b"\0", b" ", b"\n", dice.randbytes(8), b"\0" * 4096, good[name]))}


def zero_page(dice, good):
    """A stretch of zeros, as an unwritten page leaves it; it begins at a byte that was not zero."""
    name = dice.choice(sorted(good))
    data = good[name]
    begin = dice.choice([place for place in range(0, len(data)) if data[place]])
    begin, size = begin, dice.choice((1, 16, 64, 512, 4096))
    return {name: data[:begin] + b"\0" * len(data[begin: begin + size]) + data[begin + size:]}


def swap_stretches(dice, good):
    """Two stretches of one file change places; they differ."""
    name = dice.choice(sorted(good))
    data, size = bytearray(good[name]), dice.choice((1, 4, 12, 60))
    first = dice.randrange(len(data) - 2 * size)
    others = [place for place in range(first + size, len(data) - size) if data[place: place + size] != data[first: first + size]]
    second = dice.choice(others)
    data[first: first + size], data[second: second + size] = data[second: second + size], data[first: first + size]
    return {name: bytes(data)}


# -- the set of files ---------------------------------------------------------------------------------------------------------


def all_missing(good):
    """Every set of files that can be missing."""
    for count in range(1, len(good) + 1):
        for names in itertools.combinations(sorted(good), count):
            yield dict.fromkeys(names)


def all_swapped(good):
    """Every pair of files exchanged; those beside the manifest also sealed."""
    for first, second in itertools.combinations(sorted(good), 2):
        yield {first: good[second], second: good[first]}
        if MANIFEST not in (first, second):
            yield sealed(good, {first: good[second], second: good[first]})


def all_stale(good, other):
    """Every set of files of another step of the same ranks, plain and sealed. Sealed and complete it would be that other step, under this
    name: the manifest of that step is in the plain ones."""
    for count in range(1, len(good) + 1):
        for names in itertools.combinations(sorted(good), count):
            yield {name: other[name] for name in names}
            if MANIFEST not in names:
                yield sealed(good, {name: other[name] for name in names})


def another_world(dice, good, others):
    """Files that another number of ranks wrote: beside ours, or under our names, plain or sealed."""
    other = dice.choice(others)
    theirs = dice.choice(files_of(other))
    if theirs not in good and dice.random() < 0.3:
        return {theirs: other[theirs]}
    ours = dice.choice([name for name in files_of(good) if name.split("-")[0] == theirs.split("-")[0]])
    overlay = {ours: other[theirs]}
    return overlay if dice.random() < 0.5 else sealed(good, overlay)


def extra(dice, good):
    """A file that does not belong. Names with a point in front are other people's and are ignored by design."""
    stem = dice.choice(("model", "optimizer", "rank", "manifest", "latest", "x", "model-00000-of-00001", f"{dice.randrange(10**9)}",
                        f"rank-{dice.randrange(2, 10**5):05d}", f"model-{dice.randrange(10**5):05d}-of-{dice.randrange(3, 10**5):05d}"))
    name = stem + dice.choice(("", ".json", ".safetensors", ".tmp", ".bak", "~", " ", ".json.1"))
    return {name: dice.choice((b"", b"{}", *good.values()))} if name not in good else {f"{name}x": b""}


# -- forgeries ----------------------------------------------------------------------------------------------------------------


def leaves(value, path=()):
    """Every place in a JSON value but the root."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from leaves(inner, (*path, key))


def other_value(dice, old):
    """Something else in the place of `old`: another number, another type, nothing; never what counts as the same."""
    options = [None, [], {}, "", -1, 2**63, 2**64, 1e300, 0.5, [[]], {"a": 1}, "../x", "x" * 1000]
    if type(old) is int:
        options += [old + dice.randint(1, 9), old - dice.randint(1, 9), old + 2**32, float(old), str(old), bool(old), [old], 10**30]
    elif type(old) is str:
        options += [old + "x", old[:-1], old[1:], old.upper() + "Y", old + "\0", f"./{old}", len(old), [old]]
    elif isinstance(old, (list, dict)):
        items = list(old)
        options += [str(old), len(items)] + ([items[:-1], items + items[:1], items[1:]] if isinstance(old, list) and items else [])
    return dice.choice([option for option in options if type(option) is not type(old) or option != old])


def edit(dice, value, places):
    """One change in a JSON value: another value, an entry taken away, added or renamed. Changes `value`."""
    path = dice.choice(places)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    key, action = path[-1], dice.random()
    if action < 0.15:
        del holder[key]
    elif action < 0.25 and isinstance(holder, dict):
        holder[dice.choice((f"{key}x", f"{key} ", "", "../x", "__metadata__"))] = holder.pop(key)
    else:
        holder[key] = other_value(dice, holder[key])


def forge_manifest(dice, good):
    value = manifest_of(good)
    places = [path for path in leaves(value) if path[0] not in ("scheduler", "loader", "extra") and path[:2] != ("optimizer", "values")
              and "options" not in path and not (path[-1] == "digest" and "chunks" in path)]
    edit(dice, value, places)
    return {MANIFEST: seal(value)}


def forge_names(dice, good):
    """A file under a hostile name, in the table and in every chunk that points to it."""
    value = manifest_of(good)
    old = dice.choice(files_of(good))
    parts = ("..", "/", "\\", "\0", "C:", "~", "a", ".safetensors", "%2e%2e", "\u202e", "//", "\n", old, "$HOME", "con", ".", "é", "*")
    new = "".join(dice.choice(parts) for _ in range(dice.randint(1, 6)))
    new = new if new != old else f"{new}/"
    value["files"] = {new if name == old else name: facts for name, facts in value["files"].items()}
    tensors = itertools.chain(value["model"].values(), value["optimizer"]["tensors"].values())
    for chunk in itertools.chain.from_iterable(entry["chunks"] for entry in tensors):
        chunk["file"] = new if chunk["file"] == old else chunk["file"]
    return {MANIFEST: seal(value)}


def forge_sizes(dice, good):
    """A tensor that claims to be enormous, consistently, in the manifest or by the length of a header."""
    huge = dice.choice((2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 10**12)) - dice.randrange(1000)
    if dice.random() < 0.5:
        name = dice.choice([name for name in files_of(good) if name.endswith(".safetensors")])
        return sealed(good, {name: min(huge, 2**64 - 1).to_bytes(8, "little") + good[name][8:]})
    value = manifest_of(good)
    entry = dice.choice([*value["model"].values(), *value["optimizer"]["tensors"].values()])
    if dice.random() < 0.2 or not entry["shape"]:
        value["world_size"] = huge
    else:
        entry["shape"][0] = huge
        entry["chunks"][-1]["sizes"][0] = huge - entry["chunks"][-1]["offsets"][0]
    return {MANIFEST: seal(value)}


def forge_header(dice, good):
    """One change in what a shard says of itself, with the right digest everywhere."""
    name = dice.choice([name for name in files_of(good) if name.endswith(".safetensors")])
    data = good[name]
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8: 8 + length])
    tables = ("global_shapes", "DCP_SHARDING_INFO")
    if dice.random() < 0.3:                                  # inside one of the tables that are text
        table = dice.choice(tables)
        inner = json.loads(header["__metadata__"][table])
        edit(dice, inner, list(leaves(inner)))
        header["__metadata__"][table] = json.dumps(inner)
    else:
        edit(dice, header, list(leaves(header)))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return sealed(good, {name: len(text).to_bytes(8, "little") + text + data[8 + length:]})


def forge_random_state(dice, good):
    """A rank's random state that claims to be of another step or rank, or is of another kind."""
    name = dice.choice([name for name in files_of(good) if name.startswith("rank")])
    value = json.loads(good[name])
    value.pop("digest")
    edit(dice, value, [("step",), ("rank",), ("world_size",), ("format",)])
    return sealed(good, {name: seal(value)})
