"""Notebooks are built from text: executed, outputs kept, the same bytes every time, nothing of this machine in them."""

import importlib.util
import json
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("build_notebooks", ROOT / "notebooks" / "build.py")
build = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(build)

SOURCE = '''# %% [markdown]
# # A small notebook

# %%
import os
import ipywidgets
import fsdp_ref
print("hello", 6 * 7)
print(fsdp_ref.__file__)

# %% tags=["nbval-check-output"]
2 + 3

# %%
ipywidgets.IntSlider()

# %% tags=["raises-exception"]
1 / 0
'''


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebooks")
    source = folder / "tiny.py"
    source.write_text(SOURCE)
    target = build.build(source, folder)
    first = target.read_text()
    build.build(source, folder)
    return first, target.read_text()


def test_outputs_are_kept(built):
    notebook = nbformat.reads(built[0], as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code[0].outputs[0].text.startswith("hello 42\n")
    assert code[1].outputs[0].data["text/plain"] == "5"
    assert code[1].metadata.tags == ["nbval-check-output"]
    assert all(cell.execution_count for cell in code), "nbval refuses outputs without a count"
    assert code[3].outputs[0].ename == "ZeroDivisionError"


def test_the_same_source_gives_the_same_bytes(built):
    assert built[0] == built[1]


def test_nothing_of_this_machine_or_moment(built):
    text = built[0]
    assert str(ROOT) not in text and str(Path.home()) not in text and "ipykernel_" not in text
    notebook = json.loads(text)
    assert "widgets" not in notebook["metadata"] and "widget-view" not in text
    assert not any("execution" in cell["metadata"] for cell in notebook["cells"])


def test_failing_cell_writes_nothing(tmp_path, capsys):
    source = tmp_path / "broken.py"
    source.write_text("# %%\nraise ValueError('this cell is broken')\n")
    assert build.main([str(source), "--out", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert "broken.py" in message and "this cell is broken" in message
    assert not list(tmp_path.glob("*.ipynb*"))


def test_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "LIMIT", 200)
    source = tmp_path / "large.py"
    source.write_text("# %%\n1\n")
    with pytest.raises(build.BuildError, match="large.py gives"):
        build.build(source, tmp_path)
    assert not list(tmp_path.glob("*.ipynb*"))
