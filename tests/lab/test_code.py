"""The project's own code in a notebook: found where it stands, compared line by line, refused when it has moved."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from fsdp_ref.engine.unit import Unit
from fsdp_ref.errors import ConfigError
from fsdp_ref.lab import changed, code, read

ROOT = Path(__file__).parents[2]


def one(a):
    b = a
    return b


def two(a):
    b = a + 1
    return b


@pytest.fixture
def notebooks(tmp_path, monkeypatch):
    """Two notebooks' sources in a folder of their own."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "98_old.py").write_text("# %%\n# %%px\ndef step(x):\n    return x\n\n\n# %%\ndef step(x):\n    return 2 * x\n")
    (tmp_path / "src" / "99_new.py").write_text("# %%\nclass Runner:\n    def step(self, x):\n        return 3 * x\n")
    monkeypatch.chdir(tmp_path)


def test_the_difference_of_two_functions(capsys):
    shown = changed(one, two)
    assert shown.words == "From one to two: 2 lines added, 2 lines removed." and shown.language == "diff"
    assert "-    b = a\n+def two(a):\n+    b = a + 1\n     return b" in shown.text
    assert capsys.readouterr().out == f"{shown.words}\n\n{shown.text}\n"
    assert changed(one, one).words == "one and one are the same." and "return b" in changed(one, one).text


def test_a_function_of_a_notebook_is_its_last_definition(notebooks):
    shown = changed("98:step", "99:Runner.step")
    assert shown.text.splitlines()[:2] == ["--- step (98)", "+++ Runner.step (99)"]
    assert "-    return 2 * x" in shown.text and "+    return 3 * x" in shown.text and "return x\n" not in shown.text


def test_the_sources_of_the_course_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert code.notebook_source("00") == ROOT / "notebooks" / "src" / "00_meet_the_ranks.py"


@pytest.mark.parametrize(("what", "words"), [
    ("98:gone", "notebook 98_old has no gone any more; it has step"), ("97:step", "source of notebook 97 was not found"),
    ("step", "names no function"), ("../98:step", "names no function"), (len, "cannot be found"), (3, "cannot be found"),
])
def test_what_is_not_there_is_an_error(notebooks, what, words):
    with pytest.raises(ConfigError, match=words):
        changed(one, what)


def test_reading_shows_file_line_and_the_code_as_it_stands(capsys):
    shown = read("engine/unit.py", "reshard")
    assert shown.text.startswith("@outside_transforms\ndef reshard(self)") and shown.text in capsys.readouterr().out
    line = int(shown.words.split("line ")[1].split(":")[0])
    assert (ROOT / "fsdp_ref/engine/unit.py").read_text().splitlines()[line - 1].strip() == shown.text.splitlines()[0]
    assert shown.words.startswith("`fsdp_ref/engine/unit.py`, line ") and shown.words.endswith("`Unit.reshard`")
    assert read("engine/unit.py", "Unit.reshard") == shown and callable(Unit.reshard)


def test_decorators_are_shown_and_names_that_are_not_unique_are_refused():
    assert read("engine/unit.py", "sharded").text.startswith("@property\ndef sharded")
    with pytest.raises(ConfigError, match=r"has several __init__; write one of \['Prediction.__init__', 'Revealed.__init__'"):
        read("lab/predict.py", "__init__")


@pytest.mark.parametrize("file", ["engine/none.py", "../tests/ranks.py", "/etc/passwd", "plan/presets.toml", "engine"])
def test_files_outside_the_package_are_not_read(file):
    with pytest.raises(ConfigError, match="there is no file"):
        read(file, "x")
    with pytest.raises(ConfigError, match="has no gone any more; it has State, Unit"):
        read("engine/unit.py", "gone")


@pytest.mark.slow
def test_in_a_notebook():
    """One cell a call: a cell's own function is found, code is Markdown with a fence, and nothing is shown twice."""
    cells = ["from fsdp_ref.lab import changed, predict, read\ndef f(x):\n    return x",
             "def g(x):\n    return x + 1\nchanged(f, g)",
             "read('lab/code.py', 'changed')",
             "guess = predict('00.a', 'How many?')\nguess",
             "guess.reveal(3)"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    os.environ["PYTHONPATH"], old = str(ROOT), os.environ.get("PYTHONPATH")
    try:
        NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    finally:
        os.environ.pop("PYTHONPATH") if old is None else os.environ.update(PYTHONPATH=old)
    _, diff, source, asked, shown = (cell.outputs for cell in notebook.cells)
    assert len(diff) == len(source) == len(shown) == 1
    assert "```diff\n--- f\n+++ g" in diff[0].data["text/markdown"] and "+    return x + 1" in diff[0].data["text/plain"]
    assert "```python\ndef changed" in source[0].data["text/markdown"]
    assert asked[0].text == "Predict 00.a: How many? (a number)\n"
    assert len(asked) == 2 and "application/vnd.jupyter.widget-view+json" in asked[1].data
    assert "measured: 3" in shown[0].data["text/plain"] and "<table>" in shown[0].data["text/html"]
