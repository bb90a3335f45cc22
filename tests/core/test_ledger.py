"""The ledger's own arithmetic: merge, windows, peaks, round trips, refusals; and the ladder's table."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fsdp_ref import alignment, ledger
from fsdp_ref.engine import data_parallel
from fsdp_ref.errors import ConfigError, FsdpRefError
from fsdp_ref.ledger import Allocation, Category, Event, Lane, Ledger, Shard
from fsdp_ref.placements import DDP, LADDER, ZERO1, ZERO2, ZERO3, Placement, Placements, transition


def book(rank, zero):
    return Ledger([Event(rank, Lane.ALL_GATHER, "all-gather", "a", "forward", zero + 1, zero + 2, 64, 2, 0),
                   Event(rank, Lane.COMPUTE, "step 1", "", "mark", zero, zero + 3)],
                  [Allocation(rank, Category.SHARDED_PARAM, "a", 10, zero),
                   Allocation(rank, Category.ALL_GATHER, "a", 30, zero + 1, zero + 2),
                   Allocation(rank, Category.UNSHARDED_PARAM, "a", 20, zero + 2, zero + 9)],
                  [Shard(rank, "a", "a.weight", (5, 3), "float32", 3 * rank, 3 - rank, 3)], zero, zero + 10, {"backend": "gloo"})


def test_merge_puts_all_ranks_on_one_clock():
    merged = Ledger.merge([book(1, 105.0), book(0, 100.0)])
    assert merged.ranks == [0, 1] and merged.start == 0.0 and merged.end == 15.0
    assert {e.rank: e.start for e in merged.events if e.lane == Lane.ALL_GATHER} == {0: 1.0, 1: 6.0}
    assert merged.of_rank(1).ranks == [1] and len(merged.shards) == 2


def test_peak_counts_a_freed_byte_once():
    assert book(0, 0.0).peak_bytes(0) == 40        # 10 + 30; the gather buffer is freed at the very moment the weights appear
    assert book(0, 0.0).peak_bytes(7) == 0


def test_window_keeps_what_happened_inside_and_what_was_alive():
    rows = book(0, 0.0)
    rows.events.append(Event(0, Lane.COMPUTE, "forward", "a", "forward", 5.0, 6.0))
    window = rows.window("step 1")
    assert [e.name for e in window.events] == ["all-gather"] and len(window.allocations) == 3
    assert len(Ledger.merge([rows]).window("step 1").allocations) == 3
    with pytest.raises(FsdpRefError, match=r"'step 9'.*\['step 1'\]"):
        rows.window("step 9")


def test_round_trip_through_a_file(tmp_path):
    path = Ledger.merge([book(0, 1.0), book(1, 1.5)]).save(tmp_path / "ledger.json")
    assert Ledger.load(path) == Ledger.merge([book(0, 1.0), book(1, 1.5)])


@pytest.mark.parametrize("damage", [lambda d: d.pop("format"), lambda d: d["events"][0].pop("unit"),
                                    lambda d: d["shards"][0].update(shape=3), lambda d: d.update(start="x"),
                                    lambda d: d["events"].append(7)])
def test_a_damaged_file_is_refused_by_name(tmp_path, damage):
    data = book(0, 0.0).to_json()
    damage(data)
    (tmp_path / "l.json").write_text(json.dumps(data))
    with pytest.raises(FsdpRefError, match="ledger"):
        Ledger.load(tmp_path / "l.json")
    with pytest.raises(FsdpRefError, match="missing.json"):
        Ledger.load(tmp_path / "missing.json")


def test_a_recording_knows_what_was_alive_before_and_ends_complete():
    before = ledger.allocate(Category.OPTIMIZER, "optimizer", 100)
    with ledger.record(note="x") as rows:
        inside = ledger.allocate(Category.ALL_GATHER, "u", 7)
        ledger.free(inside)
        with ledger.mark("m"):
            ledger.add_event(Lane.COMPUTE, "forward", "u", "forward", ledger.now(), ledger.now())
        with pytest.raises(FsdpRefError, match="already on"), ledger.record():
            pass
    ledger.free(before)
    ledger.free(before)
    mine = [row for row in rows.allocations if row.bytes in (100, 7)]
    assert [(r.bytes, r.end is None) for r in mine] == [(100, True), (7, False)]
    assert rows.window("m").events[0].unit == "u" and rows.meta == {"note": "x"}
    ledger.add_event(Lane.COMPUTE, "late", "u", "forward", 0.0, 0.0)
    assert all(e.name != "late" for e in rows.events)


def test_shards_entered_anew_replace_the_old_ones_in_a_recording():
    first = ledger.hold_shards([Shard(0, "Block", "weight", (4, 2), "float32", 0, 2, 2)])
    with ledger.record() as rows:
        ledger.release_shards(first)
        second = ledger.hold_shards([Shard(0, "blocks.0", "blocks.0.weight", (4, 2), "float32", 0, 2, 2)])
    ledger.release_shards(second)
    assert [row.unit for row in rows.shards if row.shape == (4, 2)] == ["blocks.0"]


def test_ring_bytes():
    event = Event(0, Lane.ALL_REDUCE, "all-reduce", "u", "backward", 0, 1, 800, 4)
    assert event.wire_bytes == 2 * 800 * 3 / 4
    assert Event(0, Lane.COMPUTE, "forward", "u", "forward", 0, 1, 800).wire_bytes == 0


def test_the_ladder_costs_what_the_zero_paper_says():
    """Figure 1 of the ZeRO paper: 7.5B parameters, fp16 weights and gradients, K = 12, 64 ranks: 120, 31.4, 16.6, 1.9 GB."""
    sizes = {"parameter": 2, "gradient": 2, "optimizer": 12}
    gigabytes = [round(7.5 * row.bytes_per_parameter(64, **sizes), 1) for row in (DDP, ZERO1, ZERO2, ZERO3)]
    assert gigabytes == [120.0, 31.4, 16.6, 1.9]
    assert [row.bytes_per_parameter(4) for row in LADDER[:4]] == [16.0, 10.0, 7.0, 4.0]


def test_transitions_are_the_collectives():
    R, S, P = Placement.REPLICATE, Placement.SHARD, Placement.PARTIAL
    assert [transition(*pair) for pair in ((S, R), (P, S), (P, R), (R, S), (S, S))] == [
        "all-gather", "reduce-scatter", "all-reduce", "local slice", "nothing"]
    with pytest.raises(ConfigError, match="no operation turns replicate into partial"):
        transition(R, P)


def test_rows_that_make_no_sense_say_why():
    R, S, P = Placement.REPLICATE, Placement.SHARD, Placement.PARTIAL
    for row, word in (((S, R, S), "sharded parameter"), ((S, S, R), "replicated optimizer"), ((R, P, S), "partial sum")):
        with pytest.raises(ConfigError, match=word):
            Placements(*row)

def test_merge_takes_clock_offsets_into_account_and_states_the_error():
    skewed = book(1, 103.0)                                       # its clock is 3 s ahead
    merged = Ledger.merge([book(0, 100.0), skewed], [(0.0, 0.0), (3.0, 0.002)])
    starts = {e.rank: e.start for e in merged.events if e.lane == Lane.ALL_GATHER}
    assert starts == {0: 1.0, 1: 1.0} and merged.end == 10.0 and merged.meta["clock_error_seconds"] == 0.002
    with pytest.raises(FsdpRefError, match="no ledgers to merge"):
        Ledger.merge([])


@given(st.lists(st.tuples(*[st.floats(0, 0.01)] * 4), min_size=1, max_size=4), st.floats(-5, 5))
def test_the_bound_of_the_clock_offset_holds(barriers, ahead):
    """Any barrier in which everybody has entered before anybody leaves: the true offset lies within the stated error."""
    reference, other, now = [], [], 10.0
    for a, b, c, d in barriers:
        last = now + max(a, b)
        reference.append((now + a, last + c))
        other.append((now + b + ahead, last + d + ahead))
        now += 1
    found, error = alignment.offset(reference, other, same_machine=False)
    assert abs(found - ahead) <= error + 1e-9 and error <= 0.02


def test_one_machine_is_one_clock_unless_the_barriers_say_otherwise():
    barrier = [(1.0, 1.2)]
    assert alignment.offset(barrier, [(1.1, 1.3)], same_machine=True) == (0.0, 0.0)
    assert alignment.offset(barrier, [(6.1, 6.3)], same_machine=True)[0] == pytest.approx(5.1)
    assert len(alignment.machine()) == 16 and alignment.machine() == alignment.machine()


def test_a_recording_that_ends_in_an_exception_says_so():
    with pytest.raises(ZeroDivisionError), ledger.record() as rows:
        raise ZeroDivisionError
    assert rows.meta["stopped"] == "ZeroDivisionError" and rows.end >= rows.start
    assert Ledger.merge([book(0, 0.0), rows]).meta["stopped"] == "ZeroDivisionError"


def _model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16)) for _ in range(2)), nn.Linear(16, 1))


def _activations(rank, world):
    """What is booked as activation in the middle of a step, by strategy; and the unit of each."""
    found = {}
    for name, row in (("DDP", DDP), ("ZeRO-3", ZERO3)):
        model = _model()
        model = data_parallel(model, row, units=[model[0], model[1]])
        model(torch.randn(4, 16)).sum().backward()
        with ledger.record(activations=True) as rows:
            loss = model(torch.randn(4, 16)).sum()
            alive = ledger.live_bytes(Category.ACTIVATION)
            loss.backward()
            del loss
            after = ledger.live_bytes(Category.ACTIVATION)
        saved = [a for a in rows.allocations if a.category == Category.ACTIVATION]
        found[name] = alive, after, [(a.unit, a.bytes, a.end is not None) for a in saved], rows.peak_bytes(ledger.rank())
    return found


def test_activations_are_booked_once_without_the_weights(ranks):
    """A block of two Linears and a GELU saves its input and the two tensors of width 48; the head saves its input. Float32, batch 4."""
    block, narrow = 2 * 4 * 48 * 4, 4 * 16 * 4
    for name, (alive, after, rows, _) in ranks(2, _activations)[0].items():
        assert alive == 2 * (block + narrow) + narrow, name
        assert after == 0 and all(freed for _, _, freed in rows), name
        assert [unit for unit, _, _ in rows] == ["0"] * 3 + ["1"] * 3 + ["(root)"], name


def _lifetimes(rank, world):
    model = _model()
    model = data_parallel(model, ZERO3, units=[model[0], model[1]])
    step = lambda: model(torch.randn(4, 16)).sum().backward()  # noqa: E731
    step()
    with ledger.record() as rows:
        step()
    return rows.to_json()


def test_a_full_weight_lives_from_its_gather_to_its_free(ranks):
    """ZeRO-3: each use of a unit is one life of its whole weight, which covers the compute and begins as its gather ends."""
    rows = Ledger.from_json(ranks(2, _lifetimes)[0])
    for unit in ("0", "1"):
        lives = sorted((a.start, a.end) for a in rows.allocations if a.category == Category.UNSHARDED_PARAM and a.unit == unit)
        gathers = sorted((e.start, e.end) for e in rows.events if e.lane == Lane.ALL_GATHER and e.unit == unit)
        uses = sorted((e.start, e.end) for e in rows.events if e.lane == Lane.COMPUTE and e.unit == unit)
        assert len(lives) == len(gathers) == len(uses) == 2
        for (born, dies), (asked, arrived), (begins, ends) in zip(lives, gathers, uses, strict=True):
            assert asked <= arrived <= born <= begins <= ends
            assert dies >= begins                                  # freed right after forward; in backward before its event is written


BAD = [("rank", -1, "no rank"), ("lane", "lunch", "no lane"), ("start", float("nan"), "no finite number"), ("bytes", 1.5,
                                                                                                            "no number of bytes"),
       ("end", 0.5, "before it starts"), ("end", None, "before it starts"), ("group_size", 0, "no size"), ("colour", "red", "no row has"),
       ("unit", 7, "no text")]


@pytest.mark.parametrize(("name", "value", "words"), BAD, ids=lambda v: str(v))
def test_each_field_is_checked_and_named(name, value, words):
    data = book(0, 0.0).to_json()
    data["events"][0][name] = value
    with pytest.raises(FsdpRefError, match=f"event 0 .*{words}"):
        Ledger.from_json(data)


def test_a_shard_past_its_parameter_and_a_half_written_file_are_refused(tmp_path):
    data = book(0, 0.0).to_json()
    data["shards"][0]["offset"] = 4
    with pytest.raises(FsdpRefError, match="shard 0 holds rows 4 to 7 of 5"):
        Ledger.from_json(data)
    path = book(0, 0.0).save(tmp_path / "l.json")
    path.write_text(path.read_text()[:100])
    with pytest.raises(FsdpRefError, match="cannot read the ledger .*l.json"):
        Ledger.load(path)
