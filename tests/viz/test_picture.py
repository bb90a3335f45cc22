"""A picture is a figure, words and a table: in a notebook, in a file, in a terminal; always the same for the same input."""

import functools
import html
import io
import sys

import pytest
from matplotlib.figure import Figure
from PIL import Image

from fsdp_ref import viz
from fsdp_ref.errors import ConfigError
from fsdp_ref.ledger import Category
from fsdp_ref.viz import Picture, memory_over_step, shard_map, step_timeline, style
from fsdp_ref.viz.table import as_html, as_markdown, as_text

from . import samples

DRAW = {"shards": lambda: shard_map(samples.zero3()), "whole": lambda: shard_map(samples.ddp()),
        "timeline": lambda: step_timeline(samples.zero3()),
        "memory": lambda: memory_over_step({"DDP": samples.ddp(), "ZeRO-3": samples.zero3()}),
        "held": lambda: viz.held_by_stage({"DDP": samples.ddp(), "ZeRO-3": samples.zero3()}),
        "wire": lambda: viz.wire_by_stage({"DDP": samples.ddp(), "ZeRO-3": samples.zero3()}),
        "ranks": lambda: viz.memory_by_rank(samples.zero3(), capacity=1_500_000, predicted=samples.zero3()),
        "waterfall": lambda: viz.peak_waterfall(samples.zero3(), measured=1_600_000),
        "lifetimes": lambda: viz.weight_lifetimes(samples.zero3()), "ring": lambda: viz.ring("all-reduce", 4),
        "checkpoint": lambda: viz.checkpoint_map(samples.checkpoint_tensors()),
        "resume": lambda: viz.resume_strip(samples.losses(range(1, 41)), samples.losses(range(1, 24)), samples.losses(range(21, 41)),
                                           saved=20),
        "pipeline": lambda: viz.pipeline_grid(samples.one_f_one_b(4, 8), name="1F1B")}
drawn = functools.cache(lambda name: DRAW[name]())          # for the tests that only look
ROWS = [{"name": "a|b<c>", "MiB": 1.5}, {"name": "d", "MiB": None}]


@pytest.mark.parametrize("name", DRAW)
def test_equal_input_gives_equal_bytes_at_notebook_width(name):
    one, two = drawn(name), DRAW[name]()
    assert one.png() == two.png() and one.alt == two.alt and one.table == two.table
    assert len(one.png()) < 60_000
    image = Image.open(io.BytesIO(one.png()))
    assert image.width == 902 and image.height < 900
    assert image.text["Description"] == one.alt and set(image.text) == {"Title", "Description"}


def test_the_small_file_keeps_every_fill_exactly():
    colours = {colour for _, colour in Image.open(io.BytesIO(drawn("memory").png())).convert("RGB").getcolors(10**6)}
    for category in Category:
        assert tuple(bytes.fromhex(style.CATEGORIES[category].fill[1:])) in colours, category


@pytest.mark.parametrize("name", DRAW)
def test_no_text_leaves_the_page_or_covers_another(name):
    figure = drawn(name).figure
    figure.draw_without_rendering()
    page = figure.bbox
    boxes = []
    for text in [t for axes in figure.axes for t in axes.texts + [axes.xaxis.label, axes.yaxis.label]] + figure.texts:
        if text.get_text():
            box = text.get_window_extent()
            assert box.x0 >= page.x0 and box.x1 <= page.x1 and box.y0 >= page.y0 and box.y1 <= page.y1, text
            boxes.append((box, text.get_text()))
    clashes = [(a[1], b[1]) for i, a in enumerate(boxes) for b in boxes[i + 1:]
               if min(a[0].x1, b[0].x1) - max(a[0].x0, b[0].x0) > 1 and min(a[0].y1, b[0].y1) - max(a[0].y0, b[0].y0) > 1]
    assert not clashes


def test_a_notebook_gets_png_with_alt_text_then_the_table(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, metadata=None, raw=False: shown.append((data, metadata, raw)))
    picture = drawn("memory")
    picture._ipython_display_()
    (image, metadata, _), (table, _, _) = shown
    assert image["image/png"] == picture.png() and metadata == {"image/png": {"alt": picture.alt}}
    assert image["text/html"] == picture.image_html and f'alt="{html.escape(picture.alt)}"' in image["text/html"]
    assert table["text/html"].startswith("<table><caption>Memory over one step") and "peak 1.36" not in table["text/html"]
    assert "all at one moment" in table["text/plain"]
    data, metadata = picture._repr_mimebundle_()
    assert set(data) == {"image/png", "text/plain"} and metadata["image/png"]["alt"] == picture.alt


def test_without_ipython_words_and_table_are_printed(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "IPython.display", None)
    drawn("memory").show()
    assert "ZeRO-3, rank 0: peak 1.36 MiB" in (out := capsys.readouterr().out) and "optimizer state" in out


def test_save_writes_both_files(tmp_path):
    picture = drawn("shards")
    image, words = picture.save(tmp_path / "map.v1")
    assert (image.name, words.name) == ("map.v1.png", "map.v1.md")
    assert image.read_bytes() == picture.png()
    assert picture.alt in words.read_text(encoding="utf-8") and "| rows 0–63 |" in words.read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be written to .*nowhere"):
        picture.save(tmp_path / "nowhere" / "map.png")


def test_tables_escape_what_they_show():
    assert as_text(ROWS).splitlines() == ["name    MiB", "a|b<c>  1.5", "d         –"]
    assert as_markdown(ROWS).splitlines()[1:3] == ["|---|---:|", "| a\\|b<c> | 1.5 |"]
    assert "<td>a|b&lt;c&gt;</td><td>1.5</td>" in as_html(ROWS, "x < y") and "x &lt; y" in as_html(ROWS, "x < y")


def test_a_picture_holds_a_plain_figure():
    picture = drawn("memory")
    assert isinstance(picture, Picture) and type(picture.figure) is Figure and picture.alt in repr(picture)
