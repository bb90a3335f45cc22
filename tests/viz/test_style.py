"""The look: contrast, never colour alone, no global state touched, one set of units."""

import itertools
import subprocess
import sys

import matplotlib
import pytest

from fsdp_ref.ledger import Category, Lane
from fsdp_ref.viz import memory_over_step, style
from fsdp_ref.viz.units import byte_unit, figures, time_unit

from . import samples

EVERY = {**style.CATEGORIES, **style.LANES, "backward": style.BACKWARD}


def test_every_kind_has_a_style():
    assert set(style.CATEGORIES) == set(Category) and set(style.LANES) == set(Lane)


def test_known_contrasts():
    assert style.contrast("#000000", "#ffffff") == pytest.approx(21)
    assert style.contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)          # the WCAG's own example of "just fails"


@pytest.mark.parametrize("name", EVERY, ids=str)
def test_three_to_one_against_page_and_fill(name):
    look = EVERY[name]
    assert style.contrast(style.EDGE, style.PAPER) >= 3                # the edge against the page
    assert style.contrast(style.EDGE, look.fill) >= 3                  # and against what it encloses, whichever neighbour that is
    assert style.contrast(style.ink(look.fill), look.fill) >= 4.5      # WCAG 1.4.3: text


def test_no_two_categories_differ_by_colour_alone():
    for a, b in itertools.combinations(style.CATEGORIES.values(), 2):
        assert a.fill != b.fill and a.letter != b.letter
        grey_alike = style.contrast(a.fill, b.fill) < 1.25
        assert not (grey_alike and a.hatch == b.hatch), (a, b)
    assert style.contrast(style.FORWARD.fill, style.BACKWARD.fill) > 2 and style.FORWARD.letter != style.BACKWARD.letter


def test_slashes_mean_lost_and_nothing_else():
    assert [name for name, look in EVERY.items() if "/" in look.hatch] == [Lane.WAIT]


def test_pyplot_is_never_imported():
    code = ("import sys; from tests.viz import samples; from fsdp_ref import viz;"
            "z = samples.zero3(2); [p.png() for p in (viz.shard_map(z), viz.step_timeline(z), viz.memory_over_step({'z': z}))];"
            "sys.exit('matplotlib.pyplot' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0


def test_the_users_settings_change_nothing_and_are_not_changed():
    ledgers = {"z": samples.zero3(2)}
    plain = memory_over_step(ledgers).png()
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "black", "hatch.linewidth": 5, "savefig.dpi": 30}):
        before = dict(matplotlib.rcParams)
        assert memory_over_step(ledgers).png() == plain
        assert dict(matplotlib.rcParams) == before


def test_units_follow_the_largest_value():
    assert [byte_unit(n).name for n in (0, 1023, 1024, 2**20, 3 * 2**30)] == ["bytes", "bytes", "KiB", "MiB", "GiB"]
    assert [time_unit(s).name for s in (0, 9.99e-4, 1e-3, 0.5, 2)] == ["µs", "µs", "ms", "ms", "s"]


def test_three_figures():
    values = {0.031249: "0.0312", 1.25: "1.25", 12.54: "12.5", 1250.4: "1250", 2.0: "2", 0: "0", 99.96: "100", 1e-7: "0.0000001"}
    assert {value: figures(value) for value in values} == values
