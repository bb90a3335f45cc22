"""The notebooks' widgets in a real front end: JupyterLab in headless Chromium, driven through Playwright.

A notebook is opened, its cells run, a slider is moved with the keyboard, the table beside it changes; nothing is written to the browser's
console as an error; axe-core finds nothing wrong with labels, alt texts and contrast of what the cells show. Skipped where Chromium or
Playwright is missing (Debian: apt-get install chromium; pip install playwright axe-playwright-python). With FSDP_REF_WRITE_GOLDEN=1 the
screenshot beside this file is taken anew.

[Note: the slider's handle] ipywidgets 8.1 gives a slider's handle no accessible name (its label stands beside it, unconnected), and a
widget cannot from Python. The words under the controls are a live region, so what a move did is announced; axe is not asked about handles.
"""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import nbformat
import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400),
              pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]

CELLS = [
    "from tests.viz import samples\nfrom fsdp_ref.lab import explore\nledger = samples.zero3(2)\nexplore.cut(ledger)",
    "explore.ring('all-reduce', 4)",
    "ledger",
    "from fsdp_ref.lab import ask\nask('05')",
]
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]
RULES = ["image-alt", "label", "aria-input-field-name", "color-contrast", "button-name", "select-name", "td-headers-attr",
         "th-has-data-cells"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A JupyterLab of our own on the loopback interface, with one notebook; its address."""
    folder, token = tmp_path_factory.mktemp("lab"), secrets.token_hex(16)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}      # or JupyterLab asks
    nbformat.write(notebook, folder / "explore.ipynb")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JUPYTER_CONFIG_DIR": str(folder / "config"),
                   "JUPYTER_DATA_DIR": str(folder / "data"),
                   "JUPYTER_RUNTIME_DIR": str(folder / "runtime"), "IPYTHONDIR": str(folder / "ipython")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--ip=127.0.0.1",
               f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}", "--LabApp.news_url=",
               "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    with (folder / "server.txt").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait_for(f"http://127.0.0.1:{port}/api?token={token}", process, folder / "server.txt")
        yield f"http://127.0.0.1:{port}/lab/tree/explore.ipynb?token={token}&reset"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_for(address, process, log):
    limit = time.monotonic() + 120
    while time.monotonic() < limit:
        assert process.poll() is None, log.read_text()[-2000:]
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(address, timeout=5):
            return
        time.sleep(0.3)
    raise AssertionError(f"JupyterLab did not answer: {log.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def opened(server):
    """The page with the notebook's cells run, and what the console said as errors."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1280, "height": 1500})
        page.set_default_timeout(90_000)
        errors = []
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(server)
        page.wait_for_selector(".jp-Notebook .jp-CodeCell")
        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()                 # before, cells that are run are forgotten
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        page.wait_for_selector(".jp-OutputArea img[alt^='One step on 2 ranks']")
        page.wait_for_selector(".jp-OutputArea img[alt^='Ring all-reduce on 4 ranks']")
        page.wait_for_selector(".fsdp-ref-quiz input[type=radio]")
        yield page, errors
        browser.close()


def _first(page):
    return page.locator(".jp-CodeCell").first


def test_a_slider_moved_with_the_keyboard_changes_picture_and_table(opened):
    page, _ = opened
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


def test_a_list_chooses_the_unit(opened):
    page, _ = opened
    cell = _first(page)
    cell.get_by_label("unit").select_option("layers.1")
    page.wait_for_function("() => document.querySelector('.jp-CodeCell img').alt.includes('unit layers.1')")


def test_the_representation_of_a_ledger_is_a_picture_with_words(opened):
    page, _ = opened
    image = page.locator(".jp-OutputArea img[alt^='One step on 2 ranks']")
    assert image.evaluate("image => image.naturalWidth") == 902
    assert page.locator(".jp-CodeCell").nth(2).locator("table").count() == 1


def _question(page, number):
    """The box of one question of the quiz: the smallest that has its text and a button."""
    return page.locator(".fsdp-ref-quiz > .widget-vbox", has=page.locator(f"strong:text-is('05.q{number}')"))


def test_a_question_is_answered_with_the_keyboard_alone(opened):
    page, _ = opened
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


def test_every_control_of_a_quiz_has_a_name(opened):
    page, _ = opened
    quiz = page.locator(".fsdp-ref-quiz")
    assert quiz.get_by_role("button", name="Check answer").count() == 7
    assert _question(page, 5).get_by_role("checkbox", name="optimizer's moments").count() == 1
    assert _question(page, 1).get_by_role("textbox", name="05.q1, your answer (bytes):").count() == 1
    assert _question(page, 4).get_by_role("combobox", name="1st step:").count() == 1


def test_nothing_of_a_quiz_is_cut_off_at_the_right(opened):
    page, _ = opened
    wide = page.evaluate("() => [...document.querySelectorAll('.fsdp-ref-quiz label, .fsdp-ref-quiz p, .fsdp-ref-quiz select')]"
                         ".filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText)")
    assert wide == []


def test_axe_finds_nothing_wrong_with_what_the_cells_show(opened):
    page, _ = opened
    axe = pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    source = next(Path(axe.__file__).parent.rglob("axe.min.js"))
    page.evaluate(source.read_text(encoding="utf-8"))
    where = {"include": [[".jp-OutputArea-output"]], "exclude": [[".noUi-handle"]]}          # [Note: the slider's handle]
    found = page.evaluate("([where, rules]) => axe.run(where, {runOnly: {type: 'rule', values: rules}})", [where, RULES])
    assert found["passes"]
    assert [(v["id"], [node["html"][:120] for node in v["nodes"]]) for v in found["violations"]] == []


def test_the_console_has_no_errors(opened):
    _, errors = opened
    assert errors == []
