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


def test_axe_finds_nothing_wrong_with_what_the_cells_show(shown):
    page, _ = shown
    axe = pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    source = next(Path(axe.__file__).parent.rglob("axe.min.js"))
    assert wrong_by_axe(page, source.read_text(encoding="utf-8")) == []


def test_the_console_has_no_errors(shown):
    _, errors = shown
    assert errors == []
