"""The other pictures: their tables against sums over the ledger or rules from the papers, what is drawn, what is refused."""

import dataclasses

import matplotlib.collections
import pytest
from matplotlib.colors import to_hex

from fsdp_ref import viz
from fsdp_ref.errors import ConfigError, FsdpRefError
from fsdp_ref.ledger import Category, Lane, Ledger
from fsdp_ref.viz import style
from fsdp_ref.viz.checkpoints import reads
from fsdp_ref.viz.ring import part, ring_steps

from . import samples

BOTH = {"DDP": samples.ddp(), "ZeRO-3": samples.zero3()}
MIB = 2**20


def _shapes(axes, fill, hatch=""):
    found = [c for c in axes.collections if isinstance(c, matplotlib.collections.PolyCollection)]
    return [p for c in found if to_hex(c.get_facecolor()[0]) == fill.lower() and (c.get_hatch() or "") == hatch for p in c.get_paths()]


# -- who holds what, and what moves -------------------------------------------------------------------------------------------


def test_held_by_stage_is_what_is_alive_when_the_optimizer_begins():
    for row in viz.held_by_stage(BOTH).table:
        ledger = BOTH[row["strategy"]]
        moment = next(e.start for e in ledger.events if e.lane == Lane.OPTIMIZER and e.rank == row["rank"])
        alive = [a for a in ledger.allocations if a.rank == row["rank"] and a.start <= moment and (a.end is None or a.end > moment)]
        total = lambda word: sum(a.bytes for a in alive if word in a.category) / MIB  # noqa: B023, E731
        assert row["parameter MiB"] == pytest.approx(total("parameter"))
        assert row["gradient MiB"] == pytest.approx(total("gradient"))
        assert row["optimizer state MiB"] == pytest.approx(total("optimizer"))


def test_bars_of_zero3_are_a_quarter_of_ddps():
    axes = viz.held_by_stage(BOTH).figure.axes[0]
    width = lambda path: path.vertices[:, 0].max() - path.vertices[:, 0].min()  # noqa: E731
    optimizer = sorted(map(width, _shapes(axes, style.CATEGORIES[Category.OPTIMIZER].fill)))
    assert optimizer[:4] == pytest.approx([optimizer[-1] / 4] * 4) and len(optimizer) == 8


def test_wire_by_stage_adds_up_the_events():
    for row in viz.wire_by_stage(BOTH).table:
        sent = sum(e.wire_bytes for e in BOTH[row["strategy"]].events) / 4
        assert row["all MiB"] * MIB == pytest.approx(sent)
        assert sum(v for k, v in row.items() if k.endswith("MiB") and k != "all MiB") == pytest.approx(row["all MiB"])


@pytest.mark.parametrize("draw", [viz.held_by_stage, viz.wire_by_stage])
def test_ladders_refuse_what_is_no_dict_or_empty(draw):
    with pytest.raises(ConfigError, match="needs a dict from name to ledger"):
        draw(samples.ddp())
    with pytest.raises(FsdpRefError):
        draw({"x": Ledger(events=samples.ddp(2).events[:0], allocations=samples.ddp(2).allocations[:0], shards=samples.ddp(2).shards)})


# -- memory -------------------------------------------------------------------------------------------------------------------


def test_memory_by_rank_shows_prediction_capacity_and_peaks():
    ledger, predicted = samples.zero3(3), samples.zero3(3)
    predicted.allocations = [dataclasses.replace(a, bytes=a.bytes // 2) for a in predicted.allocations]
    picture = viz.memory_by_rank(ledger, capacity=MIB, predicted=predicted)
    for row in picture.table:
        assert row["peak MiB"] * MIB == ledger.peak_bytes(row["rank"])
        assert row["predicted / measured %"] == pytest.approx(50, abs=0.1) and row["of the capacity %"] > 100
    for axes in picture.figure.axes:
        (dashed,) = [line for line in axes.lines if line.get_label() == "predicted"]
        assert dashed.is_dashed() and max(dashed.get_ydata()) * MIB == pytest.approx(predicted.peak_bytes(0))
        assert "capacity 1 MiB" in [t.get_text() for t in axes.texts]
    assert len({(a.get_xlim(), a.get_ylim()) for a in picture.figure.axes}) == 1
    assert "over the capacity" in picture.alt
    with pytest.raises(ConfigError, match="capacity"):
        viz.memory_by_rank(ledger, capacity=0)


def test_the_waterfall_ends_at_the_measurement_and_names_the_rest():
    picture = viz.waterfall({"weights": 100, "activation": 50}, 180)
    assert [(row["term"], row["bytes"]) for row in picture.table] == [
        ("weights", 100), ("activation", 50), ("predicted, together", 150), ("unexplained", 30), ("measured", 180)]
    edges = [(p.vertices[:, 0].min(), p.vertices[:, 0].max()) for p in _shapes(picture.figure.axes[0], style.PAPER, style.LOST)]
    assert edges == [(150, 180)]
    over = viz.waterfall({"weights": 200}, 180)
    assert over.table[2]["bytes"] == -20 and "-20 bytes are unexplained" in over.alt
    with pytest.raises(ConfigError, match="at least one term"):
        viz.waterfall({}, 3)


def test_the_peaks_terms_are_the_categories_at_the_peak():
    ledger = samples.zero3(2)
    picture = viz.peak_waterfall(ledger, measured=2 * MIB)
    together = next(row for row in picture.table if row["term"] == "the ledger's books, together")
    assert together["MiB"] * MIB == ledger.peak_bytes(0)
    with pytest.raises(ConfigError, match="no figures of a GPU's allocator"):
        viz.peak_waterfall(ledger)
    ledger.meta["allocator"] = {"peak_allocated": 3 * MIB}
    assert viz.peak_waterfall(ledger).table[-1]["MiB"] == 3


def test_every_life_of_a_whole_weight_is_one_bar():
    ledger = samples.zero3(2)
    picture = viz.weight_lifetimes(ledger, rank=1)
    lives = [a for a in ledger.allocations if a.rank == 1 and a.category == Category.UNSHARDED_PARAM]
    look = style.CATEGORIES[Category.UNSHARDED_PARAM]
    bars = sorted((p.vertices[:, 0].min(), p.vertices[:, 0].max()) for p in _shapes(picture.figure.axes[0], look.fill, look.hatch))
    assert [x for bar in bars for x in bar] == pytest.approx([x for a in sorted(lives, key=lambda a: a.start) for x in (a.start * 1e3,
                                                                                                                        a.end * 1e3)])
    assert {row["unit"]: row["lives"] for row in picture.table} == {"(root)": 1, "layers.0": 2, "layers.1": 2, "layers.2": 2}
    assert "At most 400 KiB" in picture.alt
    with pytest.raises(FsdpRefError, match="no whole weight of rank 9"):
        viz.weight_lifetimes(ledger, rank=9)


# -- rings --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_rings_end_with_what_the_collective_promises(world):
    ranks = frozenset(range(world))
    for kind, rounds in (("all-gather", world - 1), ("reduce-scatter", world - 1), ("all-reduce", 2 * (world - 1))):
        steps = ring_steps(kind, world)
        assert len(steps) == rounds + 1 and steps[-1].chunks_sent == rounds
        last = steps[-1].held
        if kind == "reduce-scatter":
            assert all(last[r][r] == ranks for r in range(world))
        else:
            assert all(last[r][c] == (ranks if kind == "all-reduce" else {c}) for r in range(world) for c in range(world))
        for before, step in zip(steps, steps[1:], strict=False):
            assert {(b - a) % world for a, b, _ in step.sent} == {1} and len(step.sent) == world
            assert all(before.held[source][chunk] for source, _, chunk in step.sent)          # nobody sends what it does not have


def test_the_cells_hold_the_sums_and_the_bytes_are_counted():
    picture = viz.ring("all-reduce", 3, nbytes=3 * MIB)
    total = sum(part(r, 0) for r in range(3))
    assert picture.table[-1]["rank 2"].split()[0] == str(total) == "60"
    assert [row["sent by each rank so far MiB"] for row in picture.table] == [0, 1, 2, 3, 4]
    texts = [t.get_text() for t in picture.figure.axes[-1].texts]
    assert texts.count("60") == 3 and "sent by each rank: 4 MiB" in texts
    assert len(viz.ring("all-gather", 4, step=2).figure.axes) == 1
    with pytest.raises(ConfigError, match="no ring for 'gossip'"):
        viz.ring("gossip")
    with pytest.raises(ConfigError, match="no step 9"):
        viz.ring("all-gather", 4, step=9)


# -- checkpoints, resumes, pipelines ------------------------------------------------------------------------------------------


def test_every_wanted_row_is_read_once():
    for tensor in samples.checkpoint_tensors():
        for target in tensor.loaded:
            rows = sorted(row for read in reads(tensor) if read.target is target for row in range(read.start, read.stop))
            assert rows == list(range(target.start, target.stop))
    picture = viz.checkpoint_map(samples.checkpoint_tensors())
    assert sum(row["KiB"] for row in picture.table) * 1024 == pytest.approx(96 * 512 + 257 * 256 + 2 * 4)
    assert picture.alt.startswith("A checkpoint of 4 ranks loaded by 3: 3 tensors in 4 files.")


def test_rows_in_no_file_are_hatched_and_named():
    tensor = samples.checkpoint_tensors()[0]
    holed = dataclasses.replace(tensor, saved=tensor.saved[:2] + tensor.saved[3:])
    picture = viz.checkpoint_map([holed])
    assert "In no file: layers.0.attention.weight rows 48–71." in picture.alt
    (hole,) = _shapes(picture.figure.axes[0], style.PAPER, style.LOST)
    assert (hole.vertices[:, 0].min(), hole.vertices[:, 0].max()) == pytest.approx((0.5, 0.75))
    with pytest.raises(ConfigError, match="lies outside"):
        viz.checkpoint_map([dataclasses.replace(tensor, rows=50)])


def test_an_exact_resume_is_told_from_a_near_one():
    whole, before = samples.losses(range(1, 41)), samples.losses(range(1, 24))
    exact = viz.resume_strip(whole, before, samples.losses(range(21, 41)), saved=20)
    assert "Bit-equal: yes" in exact.alt and "3 steps were done again" in exact.alt
    assert {row["difference"] for row in exact.table} == {None, 0.0}
    near = viz.resume_strip(whole, before, samples.losses(range(21, 41), off=1e-12), saved=20)
    assert "Bit-equal: no" in near.alt
    with pytest.raises(ConfigError, match="losses of three runs"):
        viz.resume_strip(whole, before, {}, saved=20)


@pytest.mark.parametrize(("stages", "batches"), [(2, 4), (4, 8), (4, 4)])
def test_the_bubble_of_1f1b_is_the_papers(stages, batches):
    """(p - 1) / m of the ideal time, and stage r keeps at most p - r micro-batches (Narayanan et al. 2021)."""
    picture = viz.pipeline_grid(samples.one_f_one_b(stages, batches))
    for row in picture.table:
        assert row["bubble / ideal %"] == pytest.approx(100 * (stages - 1) / batches)
        assert row["most in flight"] == min(stages - row["rank"], batches)
    boxes = _shapes(picture.figure.axes[0], style.FORWARD.fill)
    assert len(boxes) == stages * batches


def test_a_schedule_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="two things at once"):
        viz.pipeline_grid([viz.Box(0, "F", 0, 0, 2), viz.Box(0, "B", 0, 1, 3)])
    with pytest.raises(ConfigError, match="no piece of work"):
        viz.pipeline_grid([viz.Box(0, "Z", 0, 0, 2)])
    with pytest.raises(ConfigError, match="at least one box"):
        viz.pipeline_grid([])


# -- what a reader must beware of ---------------------------------------------------------------------------------------------


def _broken():
    ledger = samples.zero3(3)
    late = [dataclasses.replace(e, start=e.start + 2 * (e.rank == 1), end=e.end + 2 * (e.rank == 1)) for e in ledger.events]
    return dataclasses.replace(ledger, events=late, end=2.1, meta={"world_size": 4, "stopped": "RankError"})


def test_a_missing_rank_a_crash_and_skewed_clocks_are_said_in_the_picture():
    assert viz.notes(samples.zero3(3)) == viz.notes(samples.ddp(4)) == viz.notes(Ledger()) == []
    said = viz.notes(_broken())
    assert said[0] == "no row of rank 3: 3 of 4 ranks recorded" and "cut short (RankError)" in said[1]
    assert "disagree by at least" in said[2]
    for draw in (viz.step_timeline, viz.shard_map, viz.memory_by_rank, viz.weight_lifetimes):
        picture = draw(_broken())
        assert all(note in picture.alt for note in said), draw
        assert [t.get_text() for t in picture.figure.texts if t.get_text().startswith("! ")] == [f"! {note}" for note in said], draw


def test_two_seconds_of_skew_are_measured_and_a_stated_error_is_no_skew():
    ledger = _broken()
    assert 1.99 < viz.notes.__globals__["clocks_apart"](ledger.events) <= 2.0
    ledger.meta["clock_error_seconds"] = 1.5
    assert not any("disagree" in note for note in viz.notes(ledger))
