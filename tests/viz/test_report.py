"""`fsdp-ref show`: every picture in four forms, one web page that needs nothing else, traces; and what happens with half a ledger."""

import base64
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from fsdp_ref import cli, viz
from fsdp_ref.errors import FsdpRefError
from fsdp_ref.ledger import Ledger
from fsdp_ref.report import resumed, write
from fsdp_ref.train_run import Run
from fsdp_ref.viz.page import page

from . import samples, trace_rules

OWN = ("shards", "timeline", "ranks", "lifetimes")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    for name, ledger in (("DDP", samples.ddp(2)), ("ZeRO-3 <b>", samples.zero3(2))):
        ledger.meta |= {"strategy": name, "world_size": 2}
        ledger.save(folder / f"{name[:3]}.json")
    said = write([folder / "DDP.json", folder / "ZeR.json"], folder / "out")
    return said, folder / "out"


class _Page(HTMLParser):
    """What a screen reader and a browser without a network would meet."""

    def __init__(self, text):
        super().__init__()
        self.images, self.links, self.tags, self.open, self.headings = [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        if tag in ("meta", "img"):
            self.images += [attrs] if tag == "img" else []
            return
        self.links += [attrs["href"]] if "href" in attrs else []
        self.headings += [int(tag[1])] if re.fullmatch("h[1-6]", tag) else []
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_every_picture_is_there_in_every_form(report):
    said, out = report
    names = [f"{run}-{name}" for run in ("ddp", "zero-3--b-") for name in OWN] + ["memory", "held", "wire"]
    assert said.startswith(f"{len(names)} pictures") and "2 traces" in said
    for name in names:
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG") and (out / f"{name}.md").exists()
        root = ET.parse(out / f"{name}.svg").getroot()
        assert root.get("role") == "img" and root[0].tag.endswith("title") and root[1].tag.endswith("desc")
        assert len(root[1].text) > 40
    for run in ("ddp", "zero-3--b-"):
        trace_rules.check((out / f"{run}-trace.json").read_text())
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_the_page_needs_nothing_else_and_says_everything_in_words(report):
    _, out = report
    text = (out / "report.html").read_text()
    html = _Page(text)
    assert not html.open and not {"script", "link", "iframe"} & set(html.tags) and 'lang="en"' in text
    assert len(html.images) == 2 * len(OWN) + 3
    for image in html.images:
        assert base64.b64decode(image["src"].removeprefix("data:image/png;base64,")).startswith(b"\x89PNG") and len(image["alt"]) > 40
    for link in html.links:
        assert f'id="{link[1:]}"' in text if link.startswith("#") else (out / link).exists()
    assert html.headings[0] == 1 and set(html.headings[1:]) == {2}
    assert "url(" not in text and "@import" not in text and "ZeRO-3 &lt;b&gt;" in text and "<b>" not in text
    assert html.tags.count("table") == len(html.images)


def test_the_svg_is_the_same_for_the_same_input():
    one, two = (viz.step_timeline(samples.zero3(2)).svg() for _ in range(2))
    assert one == two and "<dc:date>" not in one


def test_what_cannot_be_drawn_is_said_and_the_rest_is_drawn(tmp_path):
    half = samples.zero3(2)
    half.events = []
    half.save(tmp_path / "half.json")
    assert cli.main(["show", str(tmp_path / "half.json"), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.html").read_text()
    assert "Not drawn" in text and "timeline: the ledger holds no events" in text and (tmp_path / "out" / "shards.png").exists()


def test_an_empty_ledger_is_one_clear_error(tmp_path, capsys):
    Ledger().save(tmp_path / "empty.json")
    assert cli.main(["show", str(tmp_path / "empty.json"), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "nothing could be drawn" in error and "record" in error
    assert cli.main(["show", str(tmp_path / "empty.json"), "--out", str(tmp_path / "out"), "--load-on", "0"]) == 2


def _a_run(folder, losses, **options):
    """A run's folder with a ledger and the log of a run that was left alone."""
    folder.mkdir()
    samples.zero3(2).save(folder / "ledger.json")
    options = {"dim": 8, "layers": 1, "heads": 1, "context": 8, "seed": 0, "steps": 4, "batch": 4, "lr": 0.1, "warmup": 0,
               "dropout": 0.0} | options
    (folder / "config.json").write_text(json.dumps({"options": options, "text": {"xxh3_128": "ab"}}))
    run = Run(folder)
    run.open_log(0)
    for step, loss in losses.items():
        run.log({"step": step, "loss_hex": loss.hex()})
    run.close()
    return folder


def _go_on(folder, after, losses):
    run = Run(folder)
    run.open_log(after)
    for step, loss in losses.items():
        run.log({"step": step, "loss_hex": loss.hex()})
    run.close()


def test_a_resumed_run_shows_the_steps_that_were_done_twice(tmp_path):
    run = _a_run(tmp_path / "run", {1: 4.0, 2: 3.0, 3: 2.5})
    write([run], tmp_path / "alone")
    assert not (tmp_path / "alone" / "resume.png").exists()
    _go_on(run, 2, {3: 2.5, 4: 2.25})
    write([run], tmp_path / "out")
    assert (tmp_path / "out" / "resume.png").exists()
    picture = resumed(run)
    assert picture.title == "Crash after step 3, resumed from step 2" and "bit-equal: yes" in picture.alt.lower()
    assert [row["difference"] for row in picture.table] == [None, None, 0.0, None]


def test_beside_a_run_of_the_same_options_that_was_left_alone(tmp_path):
    run = _a_run(tmp_path / "run", {1: 4.0, 2: 3.0})
    _go_on(run, 2, {3: 2.5, 4: 2.0})
    with pytest.raises(FsdpRefError, match="did no step twice"):
        resumed(run)
    twin = _a_run(tmp_path / "twin", {1: 4.0, 2: 3.0, 3: 2.5, 4: 2.25})
    other = _a_run(tmp_path / "other", {1: 4.0, 2: 3.0, 3: 2.5, 4: 2.0}, lr=0.2)
    picture = resumed(run, [other, run, twin])
    assert [row["difference"] for row in picture.table] == [None, None, 0.0, -0.25] and "no, the loss differs by up to 0.25" in picture.alt
    with pytest.raises(FsdpRefError, match="did no step twice"):
        resumed(run, [other, run])
    (twin / "config.json").write_text("{")
    with pytest.raises(FsdpRefError, match="config.json"):
        resumed(run, [twin])
    write([run, twin], tmp_path / "out")
    assert "Not drawn" in (tmp_path / "out" / "report.html").read_text()


def test_a_page_escapes_what_it_is_given():
    picture = viz.ring("all-gather", 2)
    text = page("a < b", ["<script>"], {"ring": picture}, {"x": "trace.json"}, notes=["<i>"])
    assert "<script>" not in text and "&lt;script&gt;" in text and "&lt;i&gt;" in text
    assert _Page(text).headings == [1, 2, 2]


def test_pictures_without_a_ledger_of_a_rank(tmp_path):
    ledger = samples.zero3(3)
    for kind in ("events", "allocations", "shards"):
        setattr(ledger, kind, [row for row in getattr(ledger, kind) if row.rank != 0])
    ledger.meta["world_size"] = 3
    ledger.save(tmp_path / "l.json")
    with pytest.raises(FsdpRefError, match="nothing of rank 0"):
        viz.memory_over_step({"x": ledger})
    write([tmp_path / "l.json"], tmp_path / "out")
    assert "no row of rank 0: 2 of 3 ranks recorded" in (tmp_path / "out" / "report.html").read_text()
