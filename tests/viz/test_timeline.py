"""The step timeline: the overlap numbers by hand, what is drawn, and what is refused."""

import matplotlib.collections
import pytest
from matplotlib.colors import to_hex

from fsdp_ref.errors import FsdpRefError
from fsdp_ref.ledger import Event, Lane, Ledger
from fsdp_ref.viz import rank_times, step_timeline, style
from fsdp_ref.viz.overlap import Lanes, last_arrivals
from fsdp_ref.viz.phases import phase_spans, unit_labels
from fsdp_ref.viz.timeline import own_stretches, tracks

from . import samples


def _event(lane, start, end, *, rank=0, unit="a", phase="forward", group=1, sequence=-1):
    return Event(rank, lane, str(lane), unit, phase, start, end, 8, group, sequence)


def _times(*events):
    return rank_times(Ledger(list(events)))[0]


@pytest.mark.parametrize(("compute", "gather", "overlapped", "exposed"), [
    ((0, 4), (5, 8), 0, 3), ((0, 9), (5, 8), 3, 0), ((0, 6), (5, 8), 1, 2), ((0, 5), (5, 8), 0, 3)])
def test_overlap_none_full_partial_touching(compute, gather, overlapped, exposed):
    row = _times(_event(Lane.COMPUTE, *compute), _event(Lane.ALL_GATHER, *gather))
    assert (row.communication, row.overlapped, row.exposed) == (3, overlapped, exposed)
    assert row.overlap_percent == pytest.approx(100 * overlapped / 3)


def test_a_blocked_rank_does_not_compute_although_its_root_is_open():
    row = _times(_event(Lane.COMPUTE, 0, 10, unit="(root)"), _event(Lane.ALL_GATHER, 2, 6), _event(Lane.WAIT, 3, 6))
    assert (row.compute, row.overlapped, row.exposed) == (7, 1, 3)


def test_collectives_in_flight_together_count_once_and_the_optimizer_is_compute():
    row = _times(_event(Lane.ALL_REDUCE, 0, 4), _event(Lane.ALL_REDUCE, 2, 6), _event(Lane.OPTIMIZER, 5, 9, phase="optimizer"))
    assert (row.communication, row.overlapped, row.exposed) == (6, 1, 5)


def test_no_communication_is_no_percentage():
    picture = step_timeline(Ledger([_event(Lane.COMPUTE, 0, 1)]))
    assert picture.table[0]["overlap %"] is None
    assert "no communication" in picture.alt and "no communication" in _texts(picture)


def test_waiting_for_the_last_rank_is_told_from_transfer():
    events = [_event(Lane.ALL_GATHER, 1, 6, rank=0, group=2, sequence=3), _event(Lane.ALL_GATHER, 4, 6, rank=1, group=2, sequence=3)]
    assert list(last_arrivals(events).values()) == [4]
    assert [row.early for row in rank_times(Ledger(events))] == [3, 0]


def test_who_met_whom_is_not_guessed():
    two_groups = [_event(Lane.ALL_GATHER, r, 9, rank=r, group=2, sequence=0) for r in range(4)]
    assert last_arrivals(two_groups) == {} == last_arrivals(two_groups[:1])


def test_own_time_is_the_span_less_what_is_inside_and_less_waits():
    root, layer, inner = (_event(Lane.COMPUTE, *span, unit=unit) for span, unit in (((0, 10), "(root)"), ((2, 5), "l"), ((3, 4), "l.x")))
    lanes = Lanes({Lane.COMPUTE: [inner, root, layer], Lane.WAIT: [_event(Lane.WAIT, 1, 2)]})
    events, owner, pieces = own_stretches(lanes)
    own = {event.unit: [tuple(piece) for piece in pieces[owner == i]] for i, event in enumerate(events)}
    assert own == {"(root)": [(0, 1), (5, 10)], "l": [(2, 3), (4, 5)], "l.x": [(3, 4)]}


def test_events_in_flight_at_once_have_tracks_of_their_own():
    assert tracks([_event(Lane.ALL_REDUCE, *span) for span in ((0, 5), (1, 3), (3, 4), (4, 6), (5, 7))]) == [0, 1, 1, 1, 0]


def test_phases_and_labels():
    step = samples.zero3_step(0, 4).events
    assert [name for name, _, _ in phase_spans(step)] == ["forward", "backward", "optimizer"]
    assert unit_labels(["(root)", "layers.0", "layers.1", "head", "norm"]) == {
        "(root)": "R", "layers.0": "0", "layers.1": "1", "head": "A", "norm": "B"}
    assert len(set(unit_labels([f"{x}.{i}" for x in "ab" for i in range(40)]).values())) == 80


def test_the_table_follows_from_the_events():
    ledger = samples.zero3()
    for row in step_timeline(ledger).table:
        own = [e for e in ledger.events if e.rank == row["rank"]]
        ticks = lambda *lanes: {t for e in own if e.lane in lanes for t in range(round(e.start * 1e4), round(e.end * 1e4))}  # noqa: B023, E731
        talk = ticks(Lane.ALL_GATHER, Lane.REDUCE_SCATTER)
        computing = ticks(Lane.COMPUTE, Lane.OPTIMIZER) - ticks(Lane.WAIT)
        assert row["communication ms"] == pytest.approx(len(talk) / 10)
        assert row["exposed ms"] == pytest.approx(len(talk - computing) / 10)
        assert row["overlap %"] == pytest.approx(100 * len(talk & computing) / len(talk))
        assert row["compute ms"] == pytest.approx(len(computing) / 10)


def _texts(picture):
    return [text.get_text() for text in picture.figure.axes[0].texts]


def _boxes(picture, fill, hatch):
    """Width and place of every drawn box of one look."""
    found = [c for c in picture.figure.axes[0].collections if isinstance(c, matplotlib.collections.PolyCollection)]
    paths = [p for c in found if to_hex(c.get_facecolor()[0]) == fill.lower() and (c.get_hatch() or "") == hatch for p in c.get_paths()]
    return [(p.vertices[:, 0].min(), p.vertices[:, 0].max()) for p in paths]


def test_the_hatched_boxes_are_the_exposed_time():
    ledger = samples.ddp(world=3)
    picture = step_timeline(ledger, ranks=[1])
    olive = style.LANES[Lane.ALL_REDUCE].fill
    drawn = _boxes(picture, olive, "")
    assert len(drawn) == sum(e.lane == Lane.ALL_REDUCE and e.rank == 1 for e in ledger.events)
    exposed = {round(t, 1) for a, b in _boxes(picture, olive, style.LOST) for t in [a + i / 10 for i in range(round((b - a) * 10))]}
    assert len(exposed) / 10 == pytest.approx(picture.table[1]["exposed ms"])


def test_every_rank_is_named_with_its_figures_and_every_lane():
    texts = _texts(step_timeline(samples.zero3()))
    assert [t for t in texts if t.startswith("rank ")] == [f"rank {r}" for r in range(4)]
    assert [t.replace("\n", " ") for t in texts if t.startswith("overlap")] == [
        "overlap 37.5 % exposed 12.5 ms", "overlap 34.3 % exposed 11.5 ms"] * 2
    assert texts.count("all-gather") == texts.count("reduce-scatter") == texts.count("compute") == 4
    assert "F0" in texts and "B layers.1" in texts


def test_the_alt_text_has_the_figures():
    alt = step_timeline(samples.zero3()).alt
    assert "Rank 0: step 42.5 ms" in alt and "37.5 % of it under compute, 12.5 ms exposed" in alt


def test_many_ranks_are_folded_and_counted():
    picture = step_timeline(samples.ddp(world=11))
    assert sum(text.startswith("rank ") for text in _texts(picture)) == 8
    assert any("3 more ranks not drawn" in text.get_text() for text in picture.figure.texts)
    assert len(picture.table) == 11 and "3 more ranks in the table" in picture.alt


def test_microseconds_are_chosen_for_a_short_step():
    assert "exposed µs" in step_timeline(Ledger([_event(Lane.ALL_GATHER, 0, 5e-5)])).table[0]


def test_errors_say_what_to_do():
    with pytest.raises(FsdpRefError, match="no events; record a step"):
        step_timeline(Ledger())
    with pytest.raises(FsdpRefError, match="no events"):
        step_timeline(Ledger([_event(Lane.COMPUTE, 0, 1, phase="mark")]))
    with pytest.raises(FsdpRefError, match=r"\[7\] are not all in the ledger; choose from \[0, 1\]"):
        step_timeline(samples.ddp(world=2), ranks=[7])
