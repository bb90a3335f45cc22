"""notebooks/README.md, the map of the course, names every notebook, exercise, engine file and misconception; its links lead there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.notebooks.rules import EXERCISES, RELEASED, ROOT, to_come

COURSE = ["00_meet_the_ranks", "01_collectives", "02_when_ranks_disagree", "03_the_memory_ledger", "04_data_parallel_from_scratch",
          "05_zero1_and_zero2", "06_flatten_shard_pad", "07_fsdp_forward", "08_fsdp_backward", "09_optimizer_clip_accumulate_precision",
          "10_overlap_and_prefetch", "11_checkpoint_and_resume", "12_the_real_thing"]
NOTEBOOKS = ROOT / "notebooks"
MAP = (NOTEBOOKS / "README.md").read_text()
LINKS = sorted(set(re.findall(r"\]\(([^)#]+)\)", MAP)))


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    part = re.split(r"^## ", MAP, flags=re.M)
    text = next(each for each in part if each.startswith(heading))
    return [[cell.strip() for cell in line.strip("|\n").split("|")] for line in text.splitlines() if line.startswith("|")][2:]


def test_every_notebook_is_there_in_order():
    assert [re.search(r"\((\w+)\.ipynb\)", row[0])[1] for row in rows("In order")] == COURSE
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(COURSE)


def test_every_exercise_stands_with_its_notebook():
    for row, name in zip(rows("In order"), COURSE, strict=True):
        assert re.findall(r"\[(\w+)\]", row[2]) == EXERCISES.get(name[:2], []), name


def test_every_question_is_that_of_the_notebook():
    for row, name in zip(rows("In order"), COURSE, strict=True):
        opening = re.sub(r"(?m)^# ?", "", (NOTEBOOKS / "src" / f"{name}.py").read_text()[:2500])
        assert row[1] == " ".join(re.search(r"\*\*(.+?\?)\*\*", opening, re.S)[1].split()), f"{name} asks another question"


def test_every_file_of_the_engine_is_there():
    named = set(re.findall(r"\(\.\./fsdp_ref/engine/(\w+)\.py\)", MAP))
    assert named == {path.stem for path in (ROOT / "fsdp_ref" / "engine").glob("*.py")} - {"__init__"}


def test_every_notebook_has_a_concept_with_a_source():
    found = {number for row in rows("By concept") for number in re.findall(r"\[(\d\d)\]", row[1]) if "fsdp_ref" in row[2]}
    assert found == {name[:2] for name in COURSE}


def test_every_misconception_is_there_and_refuted_in_a_notebook():
    found = rows("What you may have heard")
    assert [row[0] for row in found] == [f"M{number}" for number in range(1, 25)]
    assert all(row[1] and row[2] and re.search(r"\(\d\d_\w+\.ipynb\)", row[3]) for row in found)


@pytest.mark.parametrize("link", LINKS)
def test_links_lead_somewhere(link):
    if link.startswith(RELEASED) and Path(link).stem in to_come():
        pytest.skip("this exercise is not there yet")
    assert (NOTEBOOKS / link).exists()


@pytest.mark.parametrize("link", re.findall(r"\[(\d\d)\b[^\]]*\]\((\d\d)_\w+\.ipynb\)", MAP))
def test_a_link_leads_to_the_notebook_it_names(link):
    assert link[0] == link[1]
