"""Memory over a step: peaks against a sum over the allocations, the same axes everywhere, what is refused."""

import random

import matplotlib.collections
import pytest

from fsdp_ref.errors import ConfigError, FsdpRefError
from fsdp_ref.ledger import Allocation, Category, Ledger
from fsdp_ref.viz import memory_over_step

from . import samples

MIB = 2**20


def _alive(ledger, rank, moment, category=None):
    return sum(a.bytes for a in ledger.allocations if a.rank == rank and a.start <= moment and (a.end is None or moment < a.end)
               and category in (None, a.category))


def _peak(ledger, rank, category=None):
    """The most bytes alive at a moment, tried at every moment at which something begins."""
    return max((_alive(ledger, rank, a.start, category) for a in ledger.allocations if a.rank == rank), default=0)


def test_the_table_holds_the_peaks_of_the_allocations():
    ledgers = {"DDP": samples.ddp(), "ZeRO-3": samples.zero3()}
    *rows, last = memory_over_step(ledgers).table
    assert {row["category"] for row in rows} == {str(category) for category in Category}
    for name, ledger in ledgers.items():
        heading = f"{name} rank 0, peak MiB"
        assert last[heading] * MIB == _peak(ledger, 0) == ledger.peak_bytes(0)
        for row in rows:
            assert row[heading] * MIB == _peak(ledger, 0, row["category"])


def test_random_ledgers_agree_with_the_ledgers_own_peak():
    draw = random.Random(3)
    for _ in range(20):
        starts = [draw.randrange(12) for _ in range(12)]
        rows = [Allocation(0, draw.choice(list(Category)), "u", draw.randrange(1, 99), start,
                           draw.choice([None, start + draw.randrange(6)])) for start in starts]
        ledger = Ledger(allocations=rows, start=0, end=30)
        assert memory_over_step({"x": ledger}).table[-1]["x rank 0, peak bytes"] == ledger.peak_bytes(0) == _peak(ledger, 0)


def test_a_free_and_an_allocation_at_one_moment_do_not_add_up():
    rows = [Allocation(0, Category.ALL_GATHER, "u", 100, 0, 1), Allocation(0, Category.ALL_GATHER, "u", 100, 1, 2)]
    assert memory_over_step({"x": Ledger(allocations=rows)}).table[-1]["x rank 0, peak bytes"] == 100


def test_the_bands_are_stacked_and_their_area_is_byte_seconds():
    ledger = samples.zero3()
    axes = memory_over_step({"ZeRO-3": ledger}).figure.axes[0]
    drawn, top = 0.0, 0.0
    for band in (c for c in axes.collections if isinstance(c, matplotlib.collections.PolyCollection)):
        for path in band.get_paths():
            x, y = path.vertices[:-1].T
            top = max(top, y.max())
            drawn += abs(sum(x[i - 1] * y[i] - x[i] * y[i - 1] for i in range(len(x)))) / 2
    true = sum(a.bytes * ((ledger.end if a.end is None else a.end) - a.start) for a in ledger.allocations if a.rank == 0)
    assert drawn == pytest.approx(true * 1e3 / MIB)
    assert top == pytest.approx(_peak(ledger, 0) / MIB)


def test_panels_share_both_axes_and_label_their_peak():
    figure = memory_over_step({"DDP": samples.ddp(), "ZeRO-3": samples.zero3()}).figure
    left, right = figure.axes
    assert left.get_xlim() == right.get_xlim() and left.get_ylim() == right.get_ylim()
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["DDP, rank 0", "ZeRO-3, rank 0"]
    assert [axes.texts[-1].get_text() for axes in figure.axes] == ["peak 2.99 MiB", "peak 1.36 MiB"]
    assert "MiB" in left.get_ylabel() and "ms" in left.get_xlabel()


def test_what_was_alive_before_the_window_counts_from_its_start():
    rows = [Allocation(0, Category.SHARDED_PARAM, "u", 5 * 1024, 0, None), Allocation(0, Category.ALL_GATHER, "u", 1024, 3, 11)]
    axes = memory_over_step({"x": Ledger(allocations=rows, start=10, end=12)}).figure.axes[0]
    assert axes.get_xlim() == (0, 2)
    assert {float(x) for c in axes.collections for p in c.get_paths() for x in p.vertices[:, 0]} == {0.0, 1.0, 2.0}


def test_the_highest_rank_is_found():
    ledger = samples.ddp(world=3)
    ledger.allocations.append(Allocation(2, Category.ALL_GATHER, "u", MIB, 0.005, 0.03))
    picture = memory_over_step({"DDP": ledger}, rank=None)
    assert picture.table[-1] == {"category": "all at one moment", "DDP rank 2, peak MiB": ledger.peak_bytes(2) / MIB}
    assert "rank 1, peak MiB" in " ".join(memory_over_step({"DDP": ledger}, rank=1).table[-1])


def test_the_alt_text_names_strategy_and_peak():
    alt = memory_over_step({"DDP": samples.ddp(), "ZeRO-3": samples.zero3()}).alt
    assert "2 panels" in alt and "DDP, rank 0: peak 2.99 MiB" in alt and "ZeRO-3, rank 0: peak 1.36 MiB" in alt
    assert "optimizer state 1.56 MiB" in alt


def test_errors_say_what_to_do():
    with pytest.raises(ConfigError, match="dict from name to ledger"):
        memory_over_step({})
    with pytest.raises(ConfigError, match="dict from name to ledger"):
        memory_over_step(samples.ddp(world=2))
    with pytest.raises(FsdpRefError, match="'empty' holds no allocations; record"):
        memory_over_step({"empty": Ledger()})
    with pytest.raises(FsdpRefError, match=r"nothing of rank 5; choose one of \[0, 1\]"):
        memory_over_step({"DDP": samples.ddp(world=2)}, rank=5)
