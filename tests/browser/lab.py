"""A JupyterLab of our own on the loopback interface, and a page of it in headless Chromium, for the tests of this folder."""

from __future__ import annotations

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
from collections.abc import Iterator
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ROOT = Path(__file__).parents[2]
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]
RULES = ["image-alt", "label", "aria-input-field-name", "color-contrast", "button-name", "select-name", "td-headers-attr",
         "th-has-data-cells"]


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """Serve the notebooks of a folder; yields an address with a place for the notebook's name."""
    token, own = secrets.token_hex(16), folder / ".jupyter-of-the-test"
    settings = own / "settings" / "@jupyterlab" / "notebook-extension" / "tracker.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    settings.write_text('{"windowingMode": "none"}')            # every cell is in the page, also what is out of sight
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JUPYTER_CONFIG_DIR": str(own / "config"), "JUPYTER_DATA_DIR": str(own / "data"),
                   "JUPYTER_RUNTIME_DIR": str(own / "runtime"), "IPYTHONDIR": str(own / "ipython"), "FSDP_REF_DATA": str(own / "home"),
                   "JUPYTERLAB_SETTINGS_DIR": str(own / "settings")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--ip=127.0.0.1",
               f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}", "--LabApp.news_url=",
               "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    with (own / "server.txt").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait_for(f"http://127.0.0.1:{port}/api?token={token}", process, own / "server.txt")
        yield f"http://127.0.0.1:{port}/lab/tree/{{}}?token={token}&reset"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_for(address: str, process: subprocess.Popen, log: Path) -> None:
    limit = time.monotonic() + 120
    while time.monotonic() < limit:
        assert process.poll() is None, log.read_text()[-2000:]
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(address, timeout=5):
            return
        time.sleep(0.3)
    raise AssertionError(f"JupyterLab did not answer: {log.read_text()[-2000:]}")


@contextlib.contextmanager
def opened(driver, address: str, **view) -> Iterator[tuple]:
    """A page with a notebook whose cells have been told to run, and the list of what the console says as errors."""
    browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
    try:
        page = browser.new_page(**({"viewport": {"width": 1280, "height": 1500}} | view))
        page.set_default_timeout(90_000)
        errors: list[str] = []
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        page.wait_for_selector(".jp-Notebook .jp-Cell")
        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()                 # before, cells that are run are forgotten
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        yield page, errors
    finally:
        browser.close()


def wrong_by_axe(page, source: str) -> list:
    """What axe-core (`source`: its script) finds wrong in what the cells show; raises where it finds nothing to look at.

    [Note: the slider's handle] ipywidgets 8.1 gives a slider's handle no accessible name (its label stands beside it, unconnected), and a
    widget cannot from Python. The words under the controls are a live region, so what a move did is announced; axe is not asked about
    handles.
    """
    page.evaluate(source)
    where = {"include": [[".jp-OutputArea-output"]], "exclude": [[".noUi-handle"]]}
    found = page.evaluate("([where, rules]) => axe.run(where, {runOnly: {type: 'rule', values: rules}})", [where, RULES])
    assert found["passes"]
    return [(each["id"], [node["html"][:120] for node in each["nodes"]]) for each in found["violations"]]
