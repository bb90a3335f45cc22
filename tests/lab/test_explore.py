"""Pictures with controls: what a control changes, what stands where there are no widgets, and the pictures of objects."""

import dataclasses

import ipywidgets
import pytest
from IPython.core.interactiveshell import InteractiveShell
from torch import nn

from fsdp_ref import world
from fsdp_ref.engine import fully_shard
from fsdp_ref.engine.hooks import hooks_of
from fsdp_ref.errors import ConfigError, FsdpRefError
from fsdp_ref.lab import explore, reprs
from fsdp_ref.ledger import Category, Ledger, Shard
from fsdp_ref.viz import style
from fsdp_ref.viz.cut import held_at
from tests.viz import samples

MIB = 2**20


@pytest.fixture(scope="module")
def ledger():
    return samples.zero3(2)


@pytest.mark.parametrize("moment", [0.0, 0.0065, 0.0215, 0.0303, 0.0445])
def test_a_cut_shows_what_is_alive_at_that_moment(ledger, moment):
    for row in held_at(ledger, moment).table:
        alive = [a for a in ledger.allocations if a.rank == row["rank"] and a.start <= moment and (a.end is None or a.end > moment)]
        assert row["all MiB"] * MIB == pytest.approx(sum(a.bytes for a in alive))
        assert sum(v for k, v in row.items() if k.endswith("MiB") and not k.startswith("all MiB")) == pytest.approx(row["all MiB"])


def test_a_cut_says_what_every_rank_does(ledger):
    picture = held_at(ledger, 0.0303)
    assert "backward" in picture.table[0]["doing"] and "Rank 0 holds" in picture.alt
    assert "waiting for all-gather" in held_at(ledger, 0.003).table[0]["doing"]
    with pytest.raises(ConfigError, match="outside the recording"):
        held_at(ledger, 99.0)
    with pytest.raises(ConfigError, match="no memory of unit 'x'"):
        held_at(ledger, 0.01, unit="x")
    with pytest.raises(FsdpRefError, match="no allocations"):
        held_at(Ledger(), 0.0)


def test_moving_a_control_changes_picture_words_and_table(ledger):
    view = explore.cut(ledger)
    before = view.image.value, view.table.value, view.status.value
    view.controls["moment"].value = view.controls["moment"].options[120][1]
    after = view.image.value, view.table.value, view.status.value
    assert all(a != b for a, b in zip(before, after, strict=True))
    assert view.picture.alt in view.image.value and "<table>" in view.table.value and 'aria-live="polite"' in view.status.value


def test_every_control_has_a_label_and_takes_the_keyboard(ledger):
    views = [explore.cut(ledger), explore.ring(), explore.gather(ledger), explore.strategies({"ZeRO-3": ledger})]
    for view in views:
        for control in view.controls.values():
            assert control.description and isinstance(control, ipywidgets.SelectionSlider | ipywidgets.IntSlider | ipywidgets.Dropdown)
        assert 'alt="' in view.image.value


def test_a_gather_goes_from_shard_to_whole_and_back(ledger):
    view = explore.gather(ledger, "layers.0")
    whole = []
    for step in range(4):
        view.controls["step"].value = step
        whole.append(view.picture.table[0]["whole weights of"])
    assert whole == ["–", "–", "layers.0", "–"]
    assert any("all-gather buffer" in key for key in held_at(ledger, 0.005, unit="layers.0").table[0])
    with pytest.raises(FsdpRefError, match="no unit was gathered"):
        explore.gather(samples.ddp(2))


def test_a_ring_never_steps_past_its_end():
    view = explore.ring("all-reduce", 4)
    view.controls["step"].value = 6
    view.controls["world"].value = 3
    assert view.controls["step"].max == 4 and view.picture.table[0]["step"] == 4
    view.controls["kind"].value = "all-gather"
    assert view.controls["step"].max == 2 and "all-gather on 3 ranks" in view.picture.title


def test_strategies_choose_stage_picture_and_rank(ledger):
    view = explore.strategies({"DDP": samples.ddp(2), "ZeRO-3": ledger})
    view.controls["stage"].value, view.controls["rank"].value = "ZeRO-3", 1
    for what in view.controls["what"].options:
        view.controls["what"].value = what
        assert view.status.value.startswith('<p role="status"'), what


def test_what_cannot_be_drawn_is_said_in_place(ledger):
    empty = dataclasses.replace(ledger, shards=[])
    view = explore.strategies({"ZeRO-3": empty})
    view.controls["what"].value = "shards"
    assert 'role="alert"' in view.status.value and "holds no shards" in view.status.value


def test_without_widgets_the_static_picture_its_words_and_table_stand_there(ledger):
    data, metadata = explore.cut(ledger)._repr_mimebundle_()
    assert {"application/vnd.jupyter.widget-view+json", "image/png", "text/plain"} <= set(data)
    assert data["image/png"].startswith(b"\x89PNG") and "Rank 0 holds" in data["text/plain"] and metadata["image/png"]["alt"]


@pytest.fixture
def unit():
    """A unit in this process, which becomes a world of one for it."""
    yield hooks_of(fully_shard(nn.Linear(6, 4))).unit
    world.stop()


def test_ledgers_shards_and_units_show_as_pictures(ledger, unit):
    shell = InteractiveShell()
    reprs.install(shell)
    shard = Shard(1, "u", "u.weight", (5, 3), "float32", 2, 2, 2)
    for value, words in ((ledger, "Rank 0: step"), (shard, "Who holds which rows"), (unit, "2 parameters")):
        data, metadata = shell.display_formatter.format(value)
        assert data["image/png"] and words in data["text/plain"] and words in metadata["image/png"]["alt"]
    data, _ = shell.display_formatter.format(Ledger())
    assert "image/png" not in data and data["text/plain"].startswith("Ledger(")


def test_the_categories_of_a_cut_have_the_colours_of_everywhere(ledger):
    figure = held_at(ledger, 0.0303).figure
    assert {t.get_text()[:1] for t in figure.legends[0].get_texts()} <= {look.letter for look in style.CATEGORIES.values()}
    assert str(Category.SHARDED_PARAM) in " ".join(t.get_text() for t in figure.legends[0].get_texts())
