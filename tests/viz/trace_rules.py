"""The rules of the Trace Event Format and of Perfetto's importer, checked on a whole file. Written from their documents, not from ours.

Sources: "Trace Event Format" (Google, 2016), sections "Event Descriptions" and "Metadata Events"; Perfetto's docs, "Visualizing external
trace formats" and its importer's statistics `slice_drop_overlapping_complete_event`, `flow_no_enclosing_slice`.
"""

import json
from collections import defaultdict

NUMBER = (int, float)


def check(text: str) -> dict[str, int]:
    """Raises AssertionError naming the first rule that `text` breaks; returns how many events of each kind it holds."""
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")
    data = json.loads(text, parse_constant=refuse)
    events = data["traceEvents"]
    assert next(iter(data)) == "traceEvents" and "displayTimeUnit" not in data, "older viewers stumble over either"
    kinds = defaultdict(int)
    slices, flows, named, counters = defaultdict(list), defaultdict(list), set(), {}
    for event in events:
        kinds[event["ph"]] += 1
        for number in ("pid", "tid"):
            assert type(event[number]) is int and 0 <= event[number] < 2**31, f"{number} is a small integer, not {event[number]!r}"
        assert isinstance(event["name"], str) and event["name"]
        if event["ph"] != "M":
            assert isinstance(event["ts"], NUMBER) and 0 <= event["ts"] < 2**53 / 1000, "ts is in microseconds and exact as a double"
        {"X": _slice, "s": _flow, "t": _flow, "f": _flow, "C": _counter, "M": _name}[event["ph"]](event, slices, flows, named, counters)
    _nest(slices)
    _join(flows, slices)
    assert {key[:2] for key in slices} <= named, "every thread has a name"
    return dict(kinds)


def _slice(event, slices, *_):
    assert isinstance(event["dur"], NUMBER) and event["dur"] >= 0 and isinstance(event["cat"], str)
    start = round(event["ts"] * 1000)
    slices[event["pid"], event["tid"]].append((start, start + round(event["dur"] * 1000)))


def _flow(event, _, flows, *__):
    assert event.get("bp") == ("e" if event["ph"] == "f" else None), "the end binds to its enclosing slice"
    flows[event["cat"], event["id"], event["name"]].append((event["ts"], event["ph"], event["pid"], event["tid"]))


def _counter(event, _, __, ___, counters):
    assert event["args"] and all(isinstance(value, NUMBER) and value >= 0 for value in event["args"].values())
    key = event["pid"], event["name"]
    series, at = counters.get(key, (set(event["args"]), -1))
    assert series == set(event["args"]), "stacked series are all given each time"
    assert event["ts"] > at, "one value a moment, in order"
    counters[key] = series, event["ts"]


def _name(event, _, __, named, ___):
    field = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index", "thread_sort_index": "sort_index"}
    assert set(event["args"]) == {field[event["name"]]}
    if event["name"] == "thread_name":
        assert (event["pid"], event["tid"]) not in named
        named.add((event["pid"], event["tid"]))


def _nest(slices):
    for thread, found in slices.items():
        open_ = []
        for start, end in sorted(found, key=lambda s: (s[0], -s[1])):
            while open_ and open_[-1] <= start:
                open_.pop()
            assert not open_ or end <= open_[-1], f"slices of thread {thread} overlap without nesting"
            open_.append(end)


def _join(flows, slices):
    for key, points in flows.items():
        points.sort(key=lambda p: (p[0], "stf".index(p[1])))
        kinds = [kind for _, kind, _, _ in points]
        assert kinds == ["s", *["t"] * (len(kinds) - 2), "f"], f"flow {key} goes {kinds}"
        assert len({pid for _, _, pid, _ in points}) == len(points), "a flow visits each rank once"
        for ts, _, pid, tid in points:
            at = round(ts * 1000)
            assert any(start <= at < end for start, end in slices[pid, tid]), f"flow {key} lies outside every slice"
