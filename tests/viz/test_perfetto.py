"""The trace: the format's rules on every kind of ledger, what it says against the ledger, and what is refused."""

import copy
import json

import pytest

from fsdp_ref.errors import ConfigError, FsdpRefError
from fsdp_ref.ledger import Allocation, Category, Event, Lane, Ledger

from . import samples, trace_rules


def _trace(ledger, path, **kwargs):
    text = ledger.to_perfetto(path, **kwargs).read_text()
    return trace_rules.check(text), json.loads(text)["traceEvents"]


@pytest.mark.parametrize("ledger", [samples.zero3(), samples.ddp(world=3), Ledger.merge([samples.zero3(2), samples.zero3(2).of_rank(1)]),
                                    Ledger(allocations=[Allocation(0, Category.ALL_GATHER, "u", 5, 0.0, 1.0)])])
def test_the_rules_of_the_format_hold(ledger, tmp_path):
    _trace(ledger, tmp_path / "t.json")


def test_every_event_is_a_slice_with_its_times(tmp_path):
    ledger = samples.zero3()
    _, rows = _trace(ledger, tmp_path / "t.json")
    slices = sorted((r["pid"], round(r["ts"]), round(r["dur"]), r["name"]) for r in rows if r["ph"] == "X")
    assert slices == sorted((e.rank, round(e.start * 1e6), round(e.seconds * 1e6), f"{e.name} {e.unit}".strip()) for e in ledger.events)
    threads = {r["args"]["name"] for r in rows if r["name"] == "thread_name"}
    assert {"0 compute", "1 all-gather", "2 reduce-scatter"} <= threads
    assert [r["args"]["name"] for r in rows if r["name"] == "process_name"] == [f"rank 0{i} (measured)" for i in range(4)]


def test_any_name_is_written_as_it_is(tmp_path):
    odd = 'a "quoted" \\ back\nslash \u00e9\u2028 \x01'
    events = [Event(0, Lane.COMPUTE, odd, odd, odd, 0.0, 1.0), Event(0, Lane.ALL_GATHER, odd, odd, odd, 1.0, 2.0, 8, 2, 0)]
    _, rows = _trace(Ledger(events), tmp_path / "t.json")
    assert [(r["name"], r["args"]["phase"]) for r in rows if r["ph"] == "X"] == [(f"{odd} {odd}", odd)] * 2
    assert [r["args"].get("Collective name") for r in rows if r["ph"] == "X"] == [None, odd]


def test_one_flow_a_collective_in_the_order_of_arrival(tmp_path):
    ledger = samples.zero3(world=3)
    kinds, rows = _trace(ledger, tmp_path / "t.json")
    meetings = sum(e.sequence >= 0 for e in ledger.events) // 3
    assert kinds["s"] == kinds["t"] == kinds["f"] == meetings
    first = sorted((r["ts"], r["pid"]) for r in rows if r["ph"] in "stf" and r["id"] == 1)
    assert first[-1][1] == 1                                           # the odd rank comes last


def test_collectives_in_flight_together_get_threads_of_their_own(tmp_path):
    _, rows = _trace(samples.ddp(world=2), tmp_path / "t.json")
    assert {r["args"]["name"] for r in rows if r["name"] == "thread_name"} >= {"3 all-reduce", "3 all-reduce (2)"}


def test_the_counter_is_the_memory_alive(tmp_path):
    ledger = samples.zero3(world=2)
    _, rows = _trace(ledger, tmp_path / "t.json")
    for rank in (0, 1):
        sums = [sum(r["args"].values()) for r in rows if r["ph"] == "C" and r["pid"] == rank]
        assert max(sums) == ledger.peak_bytes(rank)


def test_predicted_ranks_are_processes_of_their_own(tmp_path):
    ledger = samples.zero3(world=2)
    _, rows = _trace(ledger, tmp_path / "t.json", predicted=ledger)
    assert {r["pid"] for r in rows} == {0, 1, 1000, 1001}
    assert "rank 01 (predicted)" in {r["args"]["name"] for r in rows if r["name"] == "process_name"}


def test_groups_of_a_mesh_are_not_mixed_up(tmp_path):
    rows = [Event(rank, Lane.ALL_GATHER, "all-gather", "u", "forward", 0.0, 1.0, 8, 2, 0, leader=rank // 2 * 2) for rank in range(4)]
    kinds, found = _trace(Ledger(rows), tmp_path / "t.json")
    assert kinds["s"] == kinds["f"] == 2
    ends = {r["id"]: r["pid"] for r in found if r["ph"] == "f"}
    assert sorted(ends.values()) == [1, 3]


def test_a_queue_is_no_transfer(tmp_path):
    event = Event(0, Lane.ALL_REDUCE, "all-reduce", "u", "backward", 1.0, 3.0, 8, 1, 0, on_wire=2.0)
    row = next(r for r in _trace(Ledger([event]), tmp_path / "t.json")[1] if r["ph"] == "X")
    assert (row["ts"], row["dur"], row["args"]["queued us"]) == (2e6, 1e6, 1e6)


def test_an_empty_ledger_and_a_missing_folder_are_one_clear_error(tmp_path):
    with pytest.raises(FsdpRefError, match="no events and no allocations"):
        Ledger().to_perfetto(tmp_path / "t.json")
    with pytest.raises(ConfigError, match="cannot write the trace .*nowhere"):
        samples.zero3(2).to_perfetto(tmp_path / "nowhere" / "t.json")
    assert not list(tmp_path.iterdir())


BREAK = {
    "overlap": lambda rows: rows.append({**next(r for r in rows if r["ph"] == "X" and r["dur"] > 1), "ts": 0.5, "dur": 1500.0}),
    "outside every slice": lambda rows: next(r for r in rows if r["ph"] == "s").update(ts=0.0),
    "small integer": lambda rows: rows[0].update(pid=-1),
    "has a name": lambda rows: rows.remove(next(r for r in rows if r["name"] == "thread_name")),
    "stacked series": lambda rows: [r for r in rows if r["ph"] == "C"][-1]["args"].popitem(),
    "binds": lambda rows: next(r for r in rows if r["ph"] == "f").pop("bp"),
}


@pytest.mark.parametrize("rule", BREAK)
def test_the_validator_sees_each_broken_rule(rule, tmp_path):
    data = json.loads(samples.zero3(2).to_perfetto(tmp_path / "t.json").read_text())
    broken = copy.deepcopy(data)
    BREAK[rule](broken["traceEvents"])
    with pytest.raises(AssertionError, match=rule):
        trace_rules.check(json.dumps(broken))
