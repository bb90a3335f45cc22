"""Two lessons as a learner meets them: opened in JupyterLab, all cells run on real ranks, a guess typed, a question of the quiz answered;
one at the usual size, one at 200 % zoom in the same window. With FSDP_REF_WRITE_GOLDEN=1 the screenshots beside this file are taken
anew."""

import os
import re
import shutil
from pathlib import Path

import pytest

from .lab import CHROMIUM, ROOT, opened, server, wrong_by_axe

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]

# Zoom halves the window in CSS pixels and doubles the pixels of each.
VIEWS = {"03_the_memory_ledger": {}, "07_fsdp_forward": {"viewport": {"width": 640, "height": 750}, "device_scale_factor": 2}}
ALL_RUN = """() => {
    const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(each => each.innerText);
    return prompts.length > 5 && prompts.every(text => /\\[\\d+\\]/.test(text));
}"""


@pytest.fixture(scope="module", params=VIEWS)
def lesson(request, tmp_path_factory):
    """The page of a lesson that has been run, what the console said, and the lesson's name."""
    folder = tmp_path_factory.mktemp("lessons")
    shutil.copy(ROOT / "notebooks" / f"{request.param}.ipynb", folder)
    with (server(folder) as address, playwright.sync_playwright() as driver,
          opened(driver, address.format(f"{request.param}.ipynb"), **VIEWS[request.param]) as (page, errors)):
        page.wait_for_function(ALL_RUN, timeout=300_000)
        yield page, errors, request.param


def look(page, lesson, what):
    if os.environ.get("FSDP_REF_WRITE_GOLDEN"):
        page.screenshot(path=str(Path(__file__).with_name(f"{lesson[:2]}_{what}.png")))


def test_every_cell_ran_and_every_picture_has_words(lesson):
    page, errors, name = lesson
    assert page.locator("[data-mime-type='application/vnd.jupyter.stderr']").all_inner_texts() == []
    pictures = page.locator(".jp-OutputArea img")
    assert pictures.count() >= 2 and all(image.get_attribute("alt") for image in pictures.all())
    pictures.first.scroll_into_view_if_needed()
    look(page, name, "picture")
    assert errors == []


def test_a_guess_is_typed_and_recorded(lesson):
    page, _, name = lesson
    field = page.locator(".widget-text input[type=text]").first
    field.fill("3")
    field.press("Enter")
    page.get_by_text("Recorded: 3").first.wait_for()
    look(page, name, "guess")


def test_a_question_is_answered_with_the_keyboard(lesson):
    page, _, name = lesson
    choice = page.locator(".widget-radio-box input[type=radio]").last
    choice.focus()
    choice.press("Space")
    question = page.locator(".widget-vbox", has=page.locator(".widget-radio-box")).last
    question.get_by_role("button", name="Check answer").press("Enter")
    # Asked for anew each time: a widget that says something else puts a new element in the old one's place.
    question.locator("[role=status]").filter(has_text=re.compile("[✓✗] .{10}")).wait_for()
    look(page, name, "quiz")


def test_nothing_is_cut_off_at_the_side(lesson):
    page, _, _ = lesson
    wide = page.evaluate("""() => [...document.querySelectorAll('.jp-OutputArea-output img')]
        .filter(each => each.getBoundingClientRect().right > window.innerWidth).map(each => each.alt)""")
    assert wide == []


def test_axe_finds_nothing_wrong_with_what_the_cells_show(lesson):
    page, _, _ = lesson
    axe = pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    source = next(Path(axe.__file__).parent.rglob("axe.min.js"))
    assert wrong_by_axe(page, source.read_text(encoding="utf-8")) == []
