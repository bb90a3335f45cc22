"""The notebooks' widgets in a real front end: JupyterLab in headless Chromium, driven through Playwright.

A notebook is opened, its cells run, a slider is moved with the keyboard, the table beside it changes; nothing is written to the browser's
console as an error; axe-core finds nothing wrong with labels, alt texts and contrast of what the cells show. Skipped where Chromium or
Playwright is missing (Debian: apt-get install chromium). With FSDP_REF_WRITE_GOLDEN=1 the screenshot beside this file is taken anew.
"""

import os
from pathlib import Path

import nbformat
import pytest

from .lab import CHROMIUM, opened, server, wrong_by_axe

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]

CELLS = [
    "from tests.viz import samples\nfrom fsdp_ref.lab import explore\nledger = samples.zero3(2)\nexplore.cut(ledger)",
    "explore.ring('all-reduce', 4)",
    "ledger",
    "from fsdp_ref.lab import ask\nask('05')",
]


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The page with the notebook's cells run, and what the console said as errors."""
    folder = tmp_path_factory.mktemp("lab")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}      # or JupyterLab asks
    nbformat.write(notebook, folder / "explore.ipynb")
    with server(folder) as address, playwright.sync_playwright() as driver, opened(driver, address.format("explore.ipynb")) as found:
        found[0].wait_for_selector(".jp-OutputArea img[alt^='One step on 2 ranks']")
        found[0].wait_for_selector(".jp-OutputArea img[alt^='Ring all-reduce on 4 ranks']")
        found[0].wait_for_selector(".fsdp-ref-quiz input[type=radio]")
        yield found


def _first(page):
    return page.locator(".jp-CodeCell").first


def test_a_slider_moved_with_the_keyboard_changes_picture_and_table(shown):
    page, _ = shown
    cell = _first(page)
    table, alt = cell.locator("table").inner_text(), cell.locator("img").get_attribute("alt")
    handle = cell.locator(".noUi-handle").first
    handle.focus()
    for _ in range(60):
        handle.press("ArrowRight")
    page.wait_for_function("() => document.querySelector('.jp-CodeCell table caption')?.innerText.startsWith('At 13.4 ms')")
    assert cell.locator("table").inner_text() != table and cell.locator("img").get_attribute("alt") != alt
    assert cell.locator("[role=status]").inner_text() == cell.locator("img").get_attribute("alt")
    if os.environ.get("FSDP_REF_WRITE_GOLDEN"):
        page.screenshot(path=str(Path(__file__).with_name("explore.png")))


def test_a_list_chooses_the_unit(shown):
    page, _ = shown
    cell = _first(page)
    cell.get_by_label("unit").select_option("layers.1")
    page.wait_for_function("() => document.querySelector('.jp-CodeCell img').alt.includes('unit layers.1')")


def test_the_representation_of_a_ledger_is_a_picture_with_words(shown):
    page, _ = shown
    image = page.locator(".jp-OutputArea img[alt^='One step on 2 ranks']")
    assert image.evaluate("image => image.naturalWidth") == 902
    assert page.locator(".jp-CodeCell").nth(2).locator("table").count() == 1


def _question(page, number):
    """The box of one question of the quiz: the smallest that has its text and a button."""
    return page.locator(".fsdp-ref-quiz > .widget-vbox", has=page.locator(f"strong:text-is('05.q{number}')"))


def test_a_question_is_answered_with_the_keyboard_alone(shown):
    page, _ = shown
    question = _question(page, 3)
    assert question.locator("[role=status]").inner_text() == ""
    question.get_by_role("radio", name="a) ").focus()
    page.keyboard.press("Space")
    page.keyboard.press("Tab")                              # each radio button of ipywidgets is a stop of its own
    page.keyboard.press("Space")
    assert question.get_by_role("radio").nth(1).is_checked() and not question.get_by_role("radio").nth(0).is_checked()
    for _ in range(3):
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    question.get_by_text("05.q3: ").wait_for()
    assert any(mark in question.locator("[role=status]").inner_text() for mark in ("✓", "✗"))
    if os.environ.get("FSDP_REF_WRITE_GOLDEN"):
        question.screenshot(path=str(Path(__file__).with_name("quiz.png")))


def test_every_control_of_a_quiz_has_a_name(shown):
    page, _ = shown
    quiz = page.locator(".fsdp-ref-quiz")
    assert quiz.get_by_role("button", name="Check answer").count() == 7
    assert _question(page, 5).get_by_role("checkbox", name="optimizer's moments").count() == 1
    assert _question(page, 1).get_by_role("textbox", name="05.q1, your answer (bytes):").count() == 1
    assert _question(page, 4).get_by_role("combobox", name="1st step:").count() == 1


def test_nothing_of_a_quiz_is_cut_off_at_the_right(shown):
    page, _ = shown
    wide = page.evaluate("() => [...document.querySelectorAll('.fsdp-ref-quiz label, .fsdp-ref-quiz p, .fsdp-ref-quiz select')]"
                         ".filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText)")
    assert wide == []


def test_axe_finds_nothing_wrong_with_what_the_cells_show(shown):
    page, _ = shown
    axe = pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    source = next(Path(axe.__file__).parent.rglob("axe.min.js"))
    assert wrong_by_axe(page, source.read_text(encoding="utf-8")) == []


def test_the_console_has_no_errors(shown):
    _, errors = shown
    assert errors == []
